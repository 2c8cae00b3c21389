"""Kill parts of the sandbox at random times. No wrong program passes, no process is left, and the next run works."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiers import TIERS, skip_unless_available

from lora_grpo import sandbox
from lora_grpo.errors import RunError
from lora_grpo.sandbox import Program, Settings, Verdict
from lora_grpo.sandbox.worker import Worker

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(workers=2, timeout_seconds=5.0)
TEST = "assert f(3) == 6\nassert f(4) == 8"
RIGHT = Program("import time\ndef f(x):\n time.sleep(0.02)\n return x * 2", TEST, ("f",), name="right")
WRONG = Program("import time\ndef f(x):\n time.sleep(0.02)\n return x + 3", TEST, ("f",), name="wrong")
MIXED = [RIGHT, WRONG] * 20


@pytest.fixture(params=TIERS)
def tier(request):
    skip_unless_available(request.param)
    sandbox.start(SETTINGS, request.param)
    yield request.param
    sandbox.stop()


def children() -> dict[int, list[int]]:
    """Return the live processes on this machine by parent."""
    pids_by_parent: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                pids_by_parent.setdefault(int(parent), []).append(int(folder.name))
    return pids_by_parent


def generations(pid: int) -> list[list[int]]:
    """Return the descendants of a process: its children, their children, and so on."""
    tree = children()
    levels = [[pid]]
    while levels[-1]:
        levels.append([child for parent in levels[-1] for child in tree.get(parent, [])])
    return levels[1:-1]


def descendants(pid: int) -> list[int]:
    return [descendant for generation in generations(pid) for descendant in generation]


def alive(pids: list[int]) -> list[int]:
    living = {pid for siblings in children().values() for pid in siblings}
    return [pid for pid in pids if pid in living]


def gone_within(seconds: float, pids: list[int]) -> list[int]:
    """Return the processes that are still alive after that time, or [] as soon as all have exited."""
    deadline = time.monotonic() + seconds
    left = alive(pids)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = alive(pids)
    return left


def run_aside(programs: list[Program]) -> tuple[threading.Thread, list[list[Verdict] | RunError]]:
    """Run programs in a thread. The returned list receives the verdicts or the error."""
    outcome: list[list[Verdict] | RunError] = []

    def run() -> None:
        try:
            outcome.append(sandbox.run(programs))
        except RunError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def moments(thread: threading.Thread, rng: random.Random, number: int) -> Iterator[None]:
    """Yield at random times while the thread runs, at most `number` times."""
    for _ in range(number):
        thread.join(rng.uniform(0.05, 0.25))
        if not thread.is_alive():
            return
        yield


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_right_and_wrong_keep_their_verdicts_when_zygotes_are_killed(tier):
    rng = random.Random(0)
    sandbox.run([RIGHT, WRONG])
    thread, outcome = run_aside(MIXED * 3)
    num_killed = 0
    first_seen = dict.fromkeys(generations(os.getpid())[0], -1.0)
    for _ in moments(thread, rng, 40):
        now = time.monotonic()
        first_seen = {pid: first_seen.get(pid, now) for pid in generations(os.getpid())[0]}
        # Skip zygotes that are just starting, because a failed start is a different error.
        started = [pid for pid, since in first_seen.items() if now - since > 1.0]
        if started and num_killed < 3:
            kill(rng.choice(started))
            num_killed += 1
    thread.join(60)
    assert not thread.is_alive()
    assert num_killed >= 2
    assert not isinstance(outcome[0], RunError), outcome[0]
    assert [verdict.passed for verdict in outcome[0]] == [True, False] * 60


def test_no_wrong_program_passes_when_anything_is_killed(tier):
    """A program that is killed runs again, so correct programs pass. One may be killed three times in a row."""
    rng = random.Random(0)
    thread, outcome = run_aside(MIXED)
    for _ in moments(thread, rng, 8):
        # None for a moment, while the workers that were killed are replaced.
        processes = descendants(os.getpid())
        if processes:
            kill(rng.choice(processes))
    thread.join(60)
    assert not thread.is_alive()
    if not isinstance(outcome[0], RunError):
        pairs = list(zip(MIXED, outcome[0], strict=True))
        assert not any(verdict.passed for program, verdict in pairs if program is WRONG)
        unlucky = [verdict for program, verdict in pairs if program is RIGHT and not verdict.passed]
        assert len(unlucky) <= 1 and {verdict.status for verdict in unlucky} <= {"memory", "crashed"}
    assert [verdict.status for verdict in sandbox.run([RIGHT, WRONG] * 4)] == ["passed", "failed"] * 4


@pytest.mark.parametrize("role", ["candidate", "examiner"])
def test_a_correct_program_passes_although_its_workers_die(tier, role, monkeypatch):
    """The zygote of each role is killed three times while the program runs."""
    workers = []
    grade = Worker.grade

    def grade_and_kill(worker, program, exam):
        workers.append(worker)
        if program.name == "slow" and len(workers) <= 3:
            threading.Timer(0.2, os.killpg, [worker.zygotes[role].process.pid, signal.SIGKILL]).start()
        return grade(worker, program, exam)

    monkeypatch.setattr(Worker, "grade", grade_and_kill)
    slow = Program("import time\ndef f(x): return time.sleep(0.5) or x * 2", TEST, ("f",), name="slow")
    assert sandbox.run([slow])[0].passed
    assert len(set(workers)) == 4


def test_a_program_that_closes_its_socket_and_runs_on_costs_no_worker(tier):
    grade_well()
    workers = generations(os.getpid())[0]
    (verdict,) = sandbox.run([Program("import os\ndef f(x):\n os.close(3)\n while True: pass", TEST, ("f",))])
    assert verdict.status == "crashed"
    assert generations(os.getpid())[0] == workers
    grade_well()


@pytest.mark.slow
def test_stopped_zygotes_do_not_hold_a_run_for_ever(tier):
    """A stopped process neither replies nor closes its socket, so only a timeout detects it."""
    sandbox.run([RIGHT, WRONG])
    before = descendants(os.getpid())
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    thread, outcome = run_aside([WRONG, RIGHT])
    thread.join(60)
    left = gone_within(60, before)
    for pid in left:
        kill(pid)
    assert not thread.is_alive()
    if not isinstance(outcome[0], RunError):
        assert not outcome[0][0].passed
    assert [verdict.status for verdict in sandbox.run([RIGHT, WRONG])] == ["passed", "failed"]
    assert left == []


# The end of the main process, which runs separately: `python -c SCRIPT tier how`

SCRIPT = """
import os, signal, subprocess, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
from lora_grpo import sandbox
from lora_grpo.sandbox import Program, Settings
tier, how = sys.argv[1:]
sandbox.start(Settings(workers=2, timeout_seconds=60.0), tier)
assert sandbox.run([Program("def f(): return 1", "assert f() == 1", ("f",))] * 2)[1].passed
if how == "with a forked child":
    # As a data loader has them: it holds copies of all descriptors, and outlives its parent.
    if os.fork() == 0:
        print("ready", flush=True)
        time.sleep(30)
        os._exit(0)
if how == "idle":
    print("ready", flush=True)
    time.sleep(60)
threading.Timer(0.5, print, ["ready"], {"flush": True}).start()
sandbox.run([Program("def f():\\n while True: pass", "assert f()", ("f",))] * 4)
"""


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("busy", signal.SIGKILL),
        ("idle", signal.SIGKILL),
        ("with a forked child", signal.SIGKILL),
        ("busy", signal.SIGTERM),
        ("busy", signal.SIGINT),
    ],
)
@pytest.mark.parametrize("tier_name", TIERS)
def test_nothing_outlives_the_process(tier_name, how, number):
    skip_unless_available(tier_name)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, tier_name, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    assert process.stdout
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
        if how == "busy":
            time.sleep(0.2)
        # A forked child has the command line of its parent, and outlives it.
        forked = [
            pid
            for pid in generations(process.pid)[0]
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(how.encode() + b"\0")
        ]
        sandboxed = [pid for pid in descendants(process.pid) if pid not in forked]
        assert len(sandboxed) >= 4
        assert len(forked) == (how == "with a forked child")
        process.send_signal(number)
        left = gone_within(60, sandboxed)
        process.kill()
        process.wait()
        for pid in forked:
            kill(pid)
    for pid in left:
        kill(pid)
    assert left == []


# Forks of the main process, as in data loaders


def in_a_fork(work) -> int:
    """Run a function in a forked process and return its exit code, or -1 if it took longer than 30 seconds."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    kill(pid)
    os.waitpid(pid, 0)
    return -1


def grade_well() -> None:
    assert [verdict.status for verdict in sandbox.run([RIGHT, WRONG] * 2)] == ["passed", "failed"] * 2


def test_a_fork_has_a_pool_of_its_own(tier):
    grade_well()
    workers = generations(os.getpid())[0]

    def child() -> None:
        grade_well()
        assert alive(workers) == workers
        sandbox.stop()
        assert alive(workers) == workers

    assert in_a_fork(child) == 0
    assert alive(workers) == workers
    grade_well()
    assert generations(os.getpid())[0] == workers


def test_fork_and_parent_grade_at_the_same_time(tier):
    grade_well()
    thread, outcome = run_aside(MIXED)
    time.sleep(0.1)
    # The thread that runs the programs does not exist in the fork, and its locks must not block the fork.
    assert in_a_fork(grade_well) == 0
    thread.join(60)
    assert not isinstance(outcome[0], RunError)
    assert [verdict.passed for verdict in outcome[0]] == [True, False] * 20


def test_two_threads_grade_at_the_same_time(tier):
    first_thread, first_outcome = run_aside(MIXED)
    second_thread, second_outcome = run_aside(MIXED[::-1])
    first_thread.join(60)
    second_thread.join(60)
    assert [verdict.passed for verdict in first_outcome[0]] == [True, False] * 20
    assert [verdict.passed for verdict in second_outcome[0]] == [False, True] * 20
