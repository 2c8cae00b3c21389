"""Attack programs: each tries to pass with a wrong answer, escape, or do harm. All must fail in every isolation tier.

The tables are in `attacks/`. The first comment of an attack describes it. The following ones set the expectations:

    # status: failed, timeout       allowed statuses, if not those of STATUSES
    # fools: exec, exit-code        naive graders that the attack fools, as checked by `test_the_attacks_are_real`
    # test: assert total([]) == 0   tests that replace TESTS, one per line
    # functions: total, Node        names that the candidate defines

Words in @...@ are replaced with the paths, ports, and processes of the canaries.
"""

import contextlib
import ctypes
import os
import platform
import re
import resource
import runpy
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.tiers import TIERS, skip_unless_available

from lora_grpo import sandbox
from lora_grpo.sandbox import Program, Settings

FOLDER = Path(__file__).parent / "attacks"
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(workers=1, timeout_seconds=0.7, memory_mb=256)
SCRATCH = ("/", "/tmp", "/dev/shm", "/var/tmp", "/run", str(ROOT), str(Path(os.__file__).parent))
STATUSES = {"failed", "crashed", "blocked"}

TESTS = """
assert total([1, 2, 3]) == 6
assert total([]) == 0
assert total([-1, 4]) == 3
assert total([10, 20, 30, 40]) == 100
"""

# A correct program that also checks that earlier programs left nothing in its process.
RIGHT = """
import builtins, decimal, gc, math, os, random, signal, sys
clean = [
    not any(hasattr(module, "poisoned") for module in (builtins, math)),
    not os.environ,
    os.getcwd() == "/",
    sys.getrecursionlimit() == 1000,
    decimal.getcontext().prec == 28,
    gc.isenabled(),
    signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0),
    not signal.pthread_sigmask(signal.SIG_BLOCK, []),
    signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    6 + 1 == 7,
]
def total(numbers):
    return sum(numbers) if all(clean) else clean
"""


@dataclass(frozen=True)
class Attack:
    """One program of a table."""

    name: str
    text: str
    header: str

    def lines(self, key: str) -> list[str]:
        return re.findall(rf"(?m)^# {key}: (.*)$", self.text)

    def words(self, key: str) -> set[str]:
        return {word for line in self.lines(key) for word in line.split(", ")}

    @property
    def test(self) -> str:
        return "\n".join(self.lines("test")) or TESTS

    @property
    def fools(self) -> set[str]:
        return self.words("fools") or ({"exec", "exit-code", "marker"} if self.name.startswith("equal") else set())

    def program(self, canaries: dict[str, object] | None = None) -> Program:
        # Drop the comments, because some attacks search memory for the tests.
        source = re.sub(r"(?m)^# [a-z]+: .*$", "#", f"{self.header}\ndef total(numbers): return -1\n{self.text}")
        functions = tuple(sorted(self.words("functions"))) or ("total",)
        return Program(fill(source, canaries or {}), self.test, functions, name=self.name)


def fill(source: str, words: dict[str, object]) -> str:
    for word, value in words.items():
        source = source.replace(f"@{word}@", str(value))
    return source


TABLES = {path.stem: runpy.run_path(str(path)) for path in sorted(FOLDER.glob("*.py"))}
DOORS = TABLES["doors"]
ATTACKS = {
    f"{kind}_{name}": Attack(f"{kind}_{name}", text, table.get("HEADER", ""))
    for kind, table in TABLES.items()
    for name, text in table.get("ATTACKS", {}).items()
}


class Canaries:
    """Files, ports, and processes of the user that no program may read, reach, or change."""

    def __init__(self, home: Path) -> None:
        self.secret = home / ".cache" / "huggingface" / "token"
        self.folder = home / "canaries"
        self.secret.parent.mkdir(parents=True)
        (self.folder / "inner").mkdir(parents=True)
        for path in (self.secret, self.folder / "kept.txt"):
            path.write_text("canary-" + os.urandom(8).hex(), encoding="utf-8")
        self.listeners = [socket.create_server(("127.0.0.1", 0))]
        self.port = self.listeners[0].getsockname()[1]
        self.unix = str(home / "s")
        for name in (self.unix, "\0" + self.unix):
            self.listeners.append(socket.socket(socket.AF_UNIX))
            self.listeners[-1].bind(name)
            self.listeners[-1].listen()
        for listener in self.listeners:
            listener.setblocking(False)
        sleep = "import time; print(1, flush=True); time.sleep(600)"
        # Do not inherit stderr. Otherwise, a process that waits for the end of our stderr would wait for the victim.
        self.victim = subprocess.Popen([sys.executable, "-c", sleep], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.victim.stdout
        self.victim.stdout.readline()
        self.home = home
        self.before = self.state()

    def words(self) -> dict[str, object]:
        return {
            "SECRET_FILE": self.secret,
            "CANARY": self.folder,
            "HOME": self.home,
            "TCP": self.port,
            "UNIX": self.unix,
            "VICTIM": self.victim.pid,
            "PARENT": os.getpid(),
            "ROOT": ROOT,
            "PYTHON": sys.executable,
            "SITE_PACKAGES": sysconfig.get_path("purelib"),
            "SEED": 0,
            "NUMBER": 105,  # setuid
        }

    def state(self) -> dict[str, object]:
        """Return everything that must not change."""
        files = {}
        for path in sorted(self.home.rglob("*")):
            status = path.lstat()
            metadata = (status.st_mode, status.st_uid, status.st_mtime_ns, status.st_ctime_ns)
            content = path.read_bytes() if path.is_file() else b""
            files[str(path)] = (metadata, content, *os.listxattr(path, follow_symlinks=False))
        library = Path(os.__file__).lstat()
        process = Path(f"/proc/{self.victim.pid}/stat").read_text().rpartition(")")[2].split()
        return {
            "files": files,
            "library": (library.st_mode, library.st_mtime_ns, library.st_ctime_ns),
            "left": [path for folder in SCRATCH for path in Path(folder).glob("*left_by_attack*")],
            "victim": (process[0] in "RSD", process[16], os.sched_getaffinity(self.victim.pid)),
            "limits": [resource.prlimit(pid, resource.RLIMIT_CORE) for pid in (self.victim.pid, os.getpid())],
            "priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)),
        }

    def check(self) -> None:
        assert self.state() == self.before
        for listener in self.listeners:
            with pytest.raises(BlockingIOError):
                listener.accept()

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for listener in self.listeners:
            listener.close()


def descendants() -> list[str]:
    """Return the command names of all live descendants of this process, including orphans (see `canaries`)."""
    parents = {}
    names = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            before, _, after = (folder / "stat").read_text().rpartition(")")
            state, parent = after.split()[:2]
            if state != "Z":
                pid = int(folder.name)
                parents[pid] = int(parent)
                names[pid] = before.partition("(")[2]
    descendant_names = []
    generation = {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        descendant_names += [names[pid] for pid in generation]
    return sorted(descendant_names)


@pytest.fixture(scope="module")
def canaries(tmp_path_factory):
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    # A short name, because the path of a Unix socket is limited to 108 bytes.
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("SECRET", "canary in the environment")
        placed_canaries = Canaries(home)
        yield placed_canaries
        placed_canaries.close()
    libc.prctl(36, 0, 0, 0, 0)


@pytest.fixture(scope="module", params=TIERS)
def tier(request, canaries):
    skip_unless_available(request.param)
    line = sandbox.start(SETTINGS, request.param)
    assert request.param in line.lower()
    yield request.param
    sandbox.stop()


@pytest.fixture(scope="module")
def pool_processes(tier):
    assert sandbox.run([Program(RIGHT, TESTS, ("total",))])[0].passed
    return descendants()


def settled(expected: list[str]) -> list[str]:
    """Wait up to two seconds for the expected processes, and return the current ones."""
    deadline = time.monotonic() + 2
    processes = descendants()
    while processes != expected and time.monotonic() < deadline:
        time.sleep(0.02)
        processes = descendants()
    return processes


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_does_not_pass_and_does_no_harm(tier, canaries, pool_processes, attack):
    programs = [attack.program(canaries.words()), Program(RIGHT, TESTS, ("total",), name="right")]
    statuses = attack.words("status") or STATUSES
    for _ in range(3):  # On a busy machine, programs that end quickly may exceed the short limit.
        started = time.monotonic()
        verdict, right = sandbox.run(programs)
        seconds = time.monotonic() - started
        if (verdict.status != "timeout" or "timeout" in statuses) and right.status != "timeout":
            break
    assert not verdict.passed
    assert verdict.status in statuses, verdict
    assert verdict.message.isprintable() and len(verdict.message) <= 600
    assert seconds < 2 * SETTINGS.timeout_seconds + 3
    assert right.passed, right
    canaries.check()
    assert settled(pool_processes) == pool_processes


@pytest.mark.parametrize("room", DOORS["DOORS"])
def test_no_door_is_open(tier, canaries, pool_processes, room):
    doors = DOORS["DOORS"][room].strip().splitlines()
    words = canaries.words()
    source = fill(f"{DOORS['HEADER']}\nDOORS = {[fill(door, words) for door in doors]!r}", words)
    for _ in range(3):
        (verdict,) = sandbox.run([Program(source, "found = opened()\nassert found == [], found", ("opened",))])
        if verdict.status != "timeout":
            break
    assert verdict.passed, verdict
    canaries.check()
    assert settled(pool_processes) == pool_processes


def test_the_doors_are_real(tmp_path):
    """Harmless doors open without a sandbox, so the test above would notice one."""
    harmless = re.compile(r"pipe|umask|getloadavg|/etc/passwd|/proc/self|listdir\(path\)|getaffinity")
    doors = [door for room in DOORS["DOORS"].values() for door in room.splitlines() if harmless.search(door)]
    words = dict.fromkeys(("SECRET_FILE", "CANARY", "HOME", "UNIX", "ROOT", "SITE_PACKAGES", "PYTHON"), tmp_path)
    words |= dict.fromkeys(("TCP", "VICTIM", "PARENT"), os.getpid())
    source = fill(f"{DOORS['HEADER']}\nDOORS = {doors!r}\nassert len(opened()) >= 9, opened()", words)
    subprocess.run([sys.executable, "-I", "-c", source], check=True)


def test_nothing_of_a_program_or_its_tests_is_left_for_the_next(tier, canaries):
    """Later processes contain no text or objects of earlier candidates and tests."""
    earlier = Program(
        "kept = 'left' 'over'\ndef total(numbers): return sum(numbers)", TESTS + "\n_ = 'left' 'over'", ("total",)
    )
    searcher = ATTACKS["poison_leftovers"].program()
    verdicts = sandbox.run([earlier, searcher, earlier, searcher])
    assert [verdict.status for verdict in verdicts] == ["passed", "failed", "passed", "failed"]


# More messages and system calls of hostile programs

CONFUSING_TESTS = """
results = []
for given in ([1, 2], {1: 2}, {3}, [[1], {2: [3]}]):
    try:
        result = total(given, given=given)
        results += [result, len(result), list(result), result[0], result.part, str(result), repr(result), bool(result)]
        results += [result in [1], next(result), result(), {result: 1}]
    except Exception as error:
        results += [str(error), error.args]
assert total(given, results) == 6.125, results
"""


@pytest.mark.parametrize("test", [TESTS, CONFUSING_TESTS])
def test_no_random_answers_pass_or_stop_the_run(tier, test):
    source = ATTACKS["wire_random_frames"].program().source
    programs = [Program(source.replace("@SEED@", str(seed)), test, ("total",)) for seed in range(100)]
    verdicts = sandbox.run(programs)
    assert [seed for seed, verdict in enumerate(verdicts) if verdict.passed] == []
    assert [verdict for verdict in verdicts if "died" in verdict.message] == []


# On x86-64: memory, time, own signals, own identity, and exiting. The kernel handles 335 and 336 (uretprobe,
# uprobe) before any filter.
ALLOWED_CALLS = {
    0, 1, 3, 7, 8, *range(10, 16), 17, 19, 20, *range(23, 26), *range(32, 40), 60, 63, 96, 97, 98, 100, 102, 104, 107,
    108, 110, 131, 186, 201, 219, 231, 270, 271, 292, 318, 335, 336,
}  # fmt: skip


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
def test_no_other_system_call_is_answered(tier):
    source = ATTACKS["kernel_by_number"].program().source
    numbers = [number for number in (*range(340), *range(420, 480)) if number not in ALLOWED_CALLS]
    verdicts = sandbox.run([Program(source.replace("@NUMBER@", str(number)), TESTS, ("total",)) for number in numbers])
    assert [number for number, verdict in zip(numbers, verdicts, strict=True) if verdict.passed] == []


# The attacks are real: they fool naive graders. Those of other tables might do harm without a sandbox.

SAME_PROCESS = """
import sys
source, test = sys.argv[1:]
namespace = {"__name__": "solution"}
exec(source, namespace)
exec(test, namespace)
open("verdict", "w").write("passed")
"""


def graded(source: str, test: str, folder: Path) -> set[str]:
    """Return the naive graders that pass a program."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-I", *command], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )

    run("-c", SAME_PROCESS, source, test)
    passed = {"exec"} if (folder / "verdict").exists() else set()
    marked = run("-c", f"{source}\n{test}\nprint('ALL TESTS PASSED')")
    passed |= {"marker"} if "ALL TESTS PASSED" in marked.stdout else set()
    return passed | ({"exit-code"} if run("-c", f"{source}\n{test}\n").returncode == 0 else set())


@pytest.mark.parametrize(
    "attack", [attack for attack in ATTACKS.values() if attack.name.split("_")[0] in ("forge", "equal", "frame")],
    ids=lambda attack: attack.name,
)  # fmt: skip
def test_the_attacks_are_real(tmp_path, attack):
    fooled = attack.fools - {"pytest", "nobody"}
    if fooled:
        assert graded(attack.program().source, attack.test, tmp_path) >= fooled
    if "pytest" in attack.fools:
        body = "".join(f"    {line}\n" for line in attack.test.strip().split("\n"))
        (tmp_path / "test_total.py").write_text(f"{attack.program().source}\n\ndef test_total():\n{body}")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        done = subprocess.run([*command, "test_total.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_naive_graders_are_right_about_honest_programs(tmp_path):
    assert graded("def total(numbers): return sum(numbers)", TESTS, tmp_path) == {"exec", "exit-code", "marker"}
    (tmp_path / "verdict").unlink()
    assert graded("def total(numbers): return -1", TESTS, tmp_path) == set()
