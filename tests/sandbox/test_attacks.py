"""Attack programs: each tries to pass with a wrong answer, escape, or do harm. All must fail in every isolation tier.

Each attack is a file in `attacks/`. Its docstring describes the attack. The comments below it set the expectations:

    # status: failed, crashed       allowed statuses; `broken` if the tests are rejected for every candidate
    # fools: exec, exit-code        naive graders that the attack fools, as checked by `test_the_attacks_are_real`
    # test: assert total([]) == 0   tests that replace TESTS, one per line
    # functions: total, Node        names that the candidate defines

An attack that succeeds in another way (reads a file, starts a process) then gives the correct answer, so that every
escape results in a pass. Words in @...@ are replaced with the paths, ports, and processes of the canaries.
"""

import contextlib
import ctypes
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.tiers import TIERS

from lora_grpo import sandbox
from lora_grpo.sandbox import BrokenTest, Program, Settings

ATTACKS = sorted((Path(__file__).parent / "attacks").glob("*.py"))
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(workers=1, timeout_seconds=0.7, memory_mb=256)
SCRATCH = ("/", "/tmp", "/dev/shm", "/var/tmp", "/run", str(ROOT), str(Path(os.__file__).parent))

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
    """One file in `attacks/`."""

    name: str
    text: str

    def header(self, key: str) -> list[str]:
        return re.findall(rf"(?m)^# {key}: (.*)$", self.text)

    def words(self, key: str) -> set[str]:
        return {word for line in self.header(key) for word in line.split(", ")}

    @property
    def test(self) -> str:
        return "\n".join(self.header("test")) or TESTS

    def program(self, canaries: dict[str, object] | None = None) -> Program:
        # Drop the header, because some attacks search memory for the tests, which the header may contain.
        source = re.sub(r"(?m)^# [a-z]+: .*$", "#", self.text)
        for word, value in (canaries or {}).items():
            source = source.replace(f"@{word}@", str(value))
        functions = tuple(sorted(self.words("functions"))) or ("total",)
        return Program(source, self.test, functions, name=self.name)


def load(path: Path) -> Attack:
    return Attack(path.stem, path.read_text(encoding="utf-8"))


class Canaries:
    """Files, ports, and processes of the user that no program may read, reach, or change."""

    def __init__(self, home: Path) -> None:
        self.secret = home / ".cache" / "huggingface" / "token"
        self.folder = home / "canaries"
        self.secret.parent.mkdir(parents=True)
        (self.folder / "inner").mkdir(parents=True)
        (home / ".ssh").mkdir()
        for path in (self.secret, home / ".ssh" / "id_rsa", self.folder / "kept.txt"):
            path.write_text("canary-" + os.urandom(8).hex(), encoding="utf-8")
        self.listeners = [socket.create_server(("127.0.0.1", 0))]
        self.port = self.listeners[0].getsockname()[1]
        self.unix = str(home / "s")
        for name in (self.unix, "\0" + self.unix):
            self.listeners.append(socket.socket(socket.AF_UNIX))
            self.listeners[-1].bind(name)
            self.listeners[-1].listen()
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind(("127.0.0.1", self.port))
        for listener in (*self.listeners, self.datagrams):
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
            told = path.lstat()
            kept = (told.st_mode, told.st_uid, told.st_mtime_ns, told.st_ctime_ns)
            content = path.read_bytes() if path.is_file() else b""
            files[str(path)] = (kept, content, *os.listxattr(path, follow_symlinks=False))
        library = Path(os.__file__).lstat()
        names = ("RLIMIT_CORE", "RLIMIT_NOFILE", "RLIMIT_AS")
        limits = [
            resource.prlimit(pid, getattr(resource, name)) for pid in (self.victim.pid, os.getpid()) for name in names
        ]
        process = Path(f"/proc/{self.victim.pid}/stat").read_text().rpartition(")")[2].split()
        return {
            "files": files,
            "library": (library.st_mode, library.st_mtime_ns, library.st_ctime_ns),
            "left": [path for folder in SCRATCH for path in Path(folder).glob("*left_by_attack*")],
            "victim": (process[0] in "RSD", process[16], os.sched_getaffinity(self.victim.pid)),
            "limits": limits,
            "priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)),
        }

    def check(self) -> None:
        assert self.state() == self.before
        for listener in self.listeners:
            with pytest.raises(BlockingIOError):
                listener.accept()
        with pytest.raises(BlockingIOError):
            self.datagrams.recv(1)

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for listener in (*self.listeners, self.datagrams):
            listener.close()


def descendants() -> list[str]:
    """Return the command names of all live descendants of this process, including orphans (see `adopt_orphans`)."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            before, _, after = (folder / "stat").read_text().rpartition(")")
            state, parent = after.split()[:2]
            if state != "Z":
                parents[int(folder.name)], names[int(folder.name)] = int(parent), before.partition("(")[2]
    found, near = [], {os.getpid()}
    while near:
        near = {pid for pid, parent in parents.items() if parent in near}
        found += [names[pid] for pid in near]
    return sorted(found)


@pytest.fixture(scope="module")
def adopt_orphans():
    """Make orphaned descendants children of this process, so that `descendants` finds them."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    libc.prctl(36, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def canaries(tmp_path_factory, adopt_orphans):
    # A short name, because the path of a Unix socket is limited to 108 bytes.
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("SECRET", "canary in the environment")
        found = Canaries(home)
        yield found
        found.close()


@pytest.fixture(scope="module", params=TIERS)
def tier(request, canaries):
    reason = sandbox.isolation.missing(request.param)
    if reason:
        pytest.skip(reason)
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
    while (found := descendants()) != expected and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_there_are_attacks_of_every_category():
    categories = {path.stem.partition("_")[0] for path in ATTACKS}
    assert categories >= {
        "forge", "wire", "equal", "frame", "read", "write", "fork", "bomb", "net", "signal", "syscall", "poison",
    }  # fmt: skip
    assert len(ATTACKS) >= 70


@pytest.mark.parametrize("path", ATTACKS, ids=lambda path: path.stem)
def test_an_attack_does_not_pass_and_does_no_harm(tier, canaries, pool_processes, path):
    attack = load(path)
    programs = [attack.program(canaries.words()), Program(RIGHT, TESTS, ("total",), name="right")]
    if attack.words("status") == {"broken"}:
        # Tests that pass functions to the candidate or use undefined names are rejected for every candidate.
        with pytest.raises(BrokenTest):
            sandbox.run(programs)
        return
    for _ in range(3):  # On a busy machine, programs that end quickly may exceed the short limit.
        verdict, right = sandbox.run(programs)
        unexpected = verdict.status == "timeout" and "timeout" not in attack.words("status")
        if not unexpected and right.status != "timeout":
            break
    assert not verdict.passed
    assert verdict.status in attack.words("status"), verdict
    assert verdict.message.isprintable() and len(verdict.message) <= 600
    assert verdict.seconds < SETTINGS.timeout_seconds + 3
    assert right.passed, right
    canaries.check()
    assert settled(pool_processes) == pool_processes


def test_nothing_of_a_program_or_its_tests_is_left_for_the_next(tier, canaries):
    """Later processes contain no text or objects of earlier candidates and tests."""
    earlier = Program(
        "kept = 'left' 'over'\ndef total(numbers): return sum(numbers)", TESTS + "\n_ = 'left' 'over'", ("total",)
    )
    searcher = load(Path(__file__).parent / "attacks" / "poison_leftovers.py").program()
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
    source = load(Path(__file__).parent / "attacks" / "wire_random_frames.py").program().source
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
    source = load(Path(__file__).parent / "attacks" / "syscall_by_number.py").program().source
    numbers = [number for number in (*range(340), *range(420, 480)) if number not in ALLOWED_CALLS]
    verdicts = sandbox.run([Program(source.replace("@NUMBER@", str(number)), TESTS, ("total",)) for number in numbers])
    answered = [number for number, verdict in zip(numbers, verdicts, strict=True) if verdict.passed]
    assert answered == []


# The attacks are real: they fool naive graders. Only programs that are harmless without a sandbox run here.

HARMLESS = [
    "forge_exit_zero", "forge_os_exit", "forge_exit_in_call", "forge_exit_in_call_hard",
    "forge_atexit", "forge_excepthook", "forge_markers", "forge_timer_exit",
    "forge_patched_exec", "forge_patched_builtins", "forge_patched_modules", "forge_patched_unittest",
    "forge_patched_import", "forge_trace_jump", "forge_profile", "forge_destructors",
    "forge_stop_iteration", "equal_everything", "equal_every_operator", "equal_int",
    "equal_int_conversions", "equal_float", "equal_bool", "equal_str",
    "equal_bytes", "equal_list", "equal_list_items", "equal_list_iteration",
    "equal_tuple", "equal_dict", "equal_set", "equal_hash",
    "equal_decimal", "equal_class_lie", "equal_metaclass", "equal_mock_any",
    "equal_repr", "equal_attributes", "equal_generator", "equal_exception_text",
    "equal_exception_class", "equal_arguments_replaced", "equal_callback", "equal_callback_globals",
    "frame_tests_in_frames", "frame_caller_constants", "frame_tracebacks", "frame_callback_frames",
]  # fmt: skip
UNDER_PYTEST = ["forge_skip", "forge_patched_modules", "equal_everything", "equal_mock_any", "frame_caller_constants"]

SAME_PROCESS = """
import sys
source, test, verdict = sys.argv[1:]
namespace = {"__name__": "solution"}
try:
    exec(source, namespace)
    exec(test, namespace)
except BaseException:
    sys.exit(1)
open(verdict, "w").write("passed")
"""


def graded(source: str, test: str, folder: Path) -> set[str]:
    """Return the naive graders that pass a program."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-I", *command], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )

    verdict = folder / "verdict"
    joined = f"{source}\n{test}\n"
    with ThreadPoolExecutor(3) as pool:
        same_process = pool.submit(run, "-c", SAME_PROCESS, source, test, str(verdict))
        exit_code = pool.submit(run, "-c", joined)
        marked = pool.submit(run, "-c", joined + "print('ALL TESTS PASSED')")
    same_process.result()
    passed = {"exec"} if verdict.exists() else set()
    passed |= {"exit-code"} if exit_code.result().returncode == 0 else set()
    return passed | ({"marker"} if "ALL TESTS PASSED" in marked.result().stdout else set())


@pytest.mark.parametrize("name", HARMLESS)
def test_the_attacks_are_real(tmp_path, name):
    program = load(Path(__file__).parent / "attacks" / f"{name}.py")
    claimed = program.words("fools") - {"pytest"}
    assert claimed, "an attack of this list says whom it fools"
    assert graded(program.program().source, program.test, tmp_path) >= claimed


@pytest.mark.parametrize("name", UNDER_PYTEST)
def test_the_attacks_are_real_under_pytest(tmp_path, name):
    attack = load(Path(__file__).parent / "attacks" / f"{name}.py")
    assert "pytest" in attack.words("fools")
    body = "".join(f"    {line}\n" for line in attack.test.strip().split("\n"))
    (tmp_path / "test_total.py").write_text(f"{attack.program().source}\n\ndef test_total():\n{body}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, "test_total.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_naive_graders_are_right_about_honest_programs(tmp_path):
    assert graded("def total(numbers): return sum(numbers)", TESTS, tmp_path) == {"exec", "exit-code", "marker"}
    (tmp_path / "verdict").unlink()
    assert graded("def total(numbers): return -1", TESTS, tmp_path) == set()
