"""Find an isolation that works on this machine, and keep a pool of workers for the whole process, one per core."""

import atexit
import contextlib
import os
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lora_grpo import console
from lora_grpo.errors import RunError, UserError
from lora_grpo.sandbox import lockdown
from lora_grpo.sandbox.exam import prepare
from lora_grpo.sandbox.launch import collect
from lora_grpo.sandbox.verdict import BrokenTest, Program, Settings, Verdict
from lora_grpo.sandbox.worker import CandidateKilled, Worker, WorkerDied

TIERS = ("landlock", "bubblewrap")
"""Safe isolation tiers, in order of preference."""
_MAX_WORKERS = 16
_ATTEMPTS = 5
"""How often a program, or a worker with it or while it starts, may be killed before the program gets a verdict."""
_TEST = "assert f() == 'open'"
_RIGHT = Program("def f(): return 'open'", _TEST, ("f",), name="the sandbox's self-test")


class Pool:
    """Workers with one isolation tier: `landlock`, `bubblewrap`, or `none`."""

    def __init__(self, settings: Settings, tier: str) -> None:
        self.settings, self.tier = settings, tier
        self.size = settings.workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        for _ in range(self.size):
            self._idle.put(None)  # started on first use
        self.workers: list[Worker] = []
        self.closed = False

    def describe(self) -> str:
        how = {
            "landlock": f"Landlock (ABI {lockdown.landlock_version()}) + seccomp",
            "bubblewrap": "bubblewrap + seccomp",
            "none": "NONE - programs run as you, with your files and your network, and may leave processes behind",
        }[self.tier]
        limits = f"{self.settings.timeout_seconds:g} s and {self.settings.memory_mb} MiB a program"
        return f"isolation {how}; {self.size} workers, {limits}"

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        """Run the programs and return their verdicts in order. If a worker dies, its program runs again."""
        exams = [prepare(program) for program in programs]
        collect()  # once, before threads start workers
        executor = ThreadPoolExecutor(min(self.size, max(1, len(programs))), "sandbox")
        try:
            return list(executor.map(self._grade, programs, exams))
        except BrokenTest:
            raise  # the workers are intact and finish their programs
        except BaseException:
            # After an error or Ctrl-C, do not leave a worker in the middle of a program.
            self.close()
            raise
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Stop all processes. The pool cannot be used again."""
        self.closed = True
        while self.workers:
            self.workers.pop().kill()

    def _grade(self, program: Program, exam: bytes) -> Verdict:
        worker = self._idle.get()
        try:
            for _ in range(_ATTEMPTS):
                try:
                    worker = worker or self._start()
                    return worker.grade(program, exam)
                except WorkerDied as error:
                    died = error
                    if not isinstance(error, CandidateKilled):
                        self._remove(worker)
                        worker = None
                    if self.closed:
                        raise
            # If a worker passes a correct program, this program is the cause.
            with contextlib.suppress(WorkerDied):
                worker = worker or self._start()
                if worker.grade(_RIGHT, prepare(_RIGHT)).passed:
                    return Verdict("crashed", f"{died} in each of {_ATTEMPTS} attempts")
            raise RunError(f"the sandbox's workers keep dying: {died}; check the machine's free memory")
        finally:
            self._idle.put(worker)

    def _start(self) -> Worker:
        worker = Worker(self.tier, self.settings)
        self.workers.append(worker)
        if self.closed:  # before the worker started, or since
            self._remove(worker)
            raise WorkerDied("the pool is closed")
        return worker

    def _remove(self, worker: Worker | None) -> None:
        if worker is not None:
            with contextlib.suppress(ValueError):  # `close` already removed it
                self.workers.remove(worker)
            worker.kill()


def missing(tier: str) -> str | None:
    """Return why a tier is unavailable, or None if it may work."""
    if not lockdown.has_seccomp():
        return "no seccomp for this system"
    if tier == "landlock" and not lockdown.landlock_version():
        return "no Landlock in this kernel (it needs Linux 5.13; the boot option lsm= may disable it)"
    if tier == "bubblewrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    return None


def escapes(pool: Pool) -> str | None:
    """Return how a program escaped or why a correct one failed, or None if the isolation works."""
    with tempfile.TemporaryDirectory() as folder:
        secret, written = Path(folder, "secret"), Path(folder, "written")
        secret.write_text("open", encoding="utf-8")
        attempts = {
            "reading a file": f"def f(): return open({str(secret)!r}).read()",
            "looking up a file": f"import os\ndef f():\n os.stat({str(secret)!r})\n return 'open'",
            "writing a file": f"def f():\n open({str(written)!r}, 'w').write('x')\n return 'open'",
            "a socket": "import socket\ndef f():\n socket.socket()\n return 'open'",
            "a new process": "import os\ndef f():\n if not os.fork(): os._exit(0)\n return 'open'",
            "a signal to this process": f"import os\ndef f():\n os.kill({os.getpid()}, 0)\n return 'open'",
            "the environment": "import os\ndef f(): return 'open' if os.environ else 'shut'",
        }
        programs = [Program(text, _TEST, ("f",)) for text in attempts.values()]
        first, *verdicts, last = pool.run([_RIGHT, *programs, _RIGHT])
        passed = [name for name, verdict in zip(attempts, verdicts, strict=True) if verdict.passed]
        if written.exists():
            passed.append("writing a file")
    for verdict in (first, last):
        if not verdict.passed:
            return f"a correct program does not pass ({verdict.status}: {verdict.message})"
    return f"{passed[0]} is possible" if passed else None


_pool: Pool | None = None
_requested: tuple[Settings, str | None] = (Settings(), None)
"""Arguments of the last `start`, used if `run` must restart the pool."""
_lock = threading.RLock()


def start(settings: Settings | None = None, tier: str | None = None) -> str:
    """Select an isolation that works on this machine, test it with escape attempts, and keep it for `run`.

    Returns:
        One line that describes the isolation and the limits, for the terminal and for reports.

    Raises:
        UserError: no isolation works and `settings.allow_unsafe` is False.
    """
    global _pool, _requested
    settings = settings or Settings()
    reasons: dict[str, str] = {}
    with _lock:
        stop()
        _requested = settings, tier
        for name in (tier,) if tier else TIERS:
            pool = Pool(settings, name)
            try:
                reason = missing(name) or escapes(pool)
            except RunError as error:
                reason = str(error)
            if reason is None:
                _pool = pool
                return pool.describe()
            pool.close()
            reasons[name] = reason
        if not settings.allow_unsafe or sys.platform != "linux":
            tried = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise UserError(
                f"no safe way to run model-written programs here ({tried}); install bubblewrap, use Linux 5.13 or "
                "newer, or pass --sandbox.allow-unsafe to run them unprotected"
            )
        _pool = Pool(settings, "none")
        return _pool.describe()


def run(programs: Sequence[Program]) -> list[Verdict]:
    """Run programs with their tests and return their verdicts in order.

    Raises:
        BrokenTest: a program's tests cannot run, which no candidate can cause.
        RunError: the sandbox's processes fail to start, or keep dying.
    """
    with _lock:
        if _pool is None or _pool.closed:
            console.note(f"sandbox: {start(*_requested)}")
        assert _pool is not None
        return _pool.run(programs)


def describe() -> str | None:
    """Return the line that `start` returned, or None if the sandbox is not running."""
    return _pool.describe() if _pool else None


def stop() -> None:
    """Stop the sandbox's processes. The next `run` restarts them."""
    global _pool
    with _lock:
        if _pool is not None:
            _pool.close()
            _pool = None


def _drop_in_child() -> None:
    """Close the sockets of the workers in a forked child, where they would keep the parent's workers alive."""
    global _pool, _lock
    for worker in _pool.workers if _pool else ():
        for control in worker.controls.values():
            control.close()
    _pool, _lock = None, threading.RLock()


atexit.register(stop)
os.register_at_fork(after_in_child=_drop_in_child)
