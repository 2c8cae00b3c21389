"""Keep a pool of workers for the whole process, one per core, in an isolation that works on this machine."""

import atexit
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lora_grpo import console
from lora_grpo.errors import RunError, UserError
from lora_grpo.sandbox import isolation
from lora_grpo.sandbox.exam import prepare
from lora_grpo.sandbox.library import collect
from lora_grpo.sandbox.verdict import BrokenTest, Program, Settings, Verdict
from lora_grpo.sandbox.worker import CandidateKilled, Worker, WorkerDied

_MAX_WORKERS = 16
_ATTEMPTS = 5
"""How often a program, or a worker with it or while it starts, may be killed before the program gets a verdict."""


class Pool:
    """Workers with one isolation tier: `landlock`, `bubblewrap`, or `none`."""

    def __init__(self, settings: Settings, tier: str) -> None:
        self.settings = settings
        self.tier = tier
        self.size = settings.workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
        self.workers: list[Worker] = []
        self.closed = False
        # One entry per worker that is free. None is a worker that starts on its first use.
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        for _ in range(self.size):
            self._idle.put(None)

    def describe(self) -> str:
        """Return one line about the isolation and the limits."""
        tier = isolation.describe_tier(self.tier)
        limits = f"{self.settings.timeout_seconds:g} s and {self.settings.memory_mb} MiB a program"
        return f"isolation {tier}; {self.size} workers, {limits}"

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        """Run the programs and return their verdicts in order. If a worker dies, its program runs again."""
        exams = [prepare(program) for program in programs]
        collect()  # once, before threads start workers
        threads = min(self.size, max(1, len(programs)))
        executor = ThreadPoolExecutor(threads, "sandbox")
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
                    last_error = error
                    if not isinstance(error, CandidateKilled):
                        self._remove(worker)
                        worker = None  # the next attempt starts another one
                    if self.closed:
                        raise

            # If a worker passes a correct program, this program is the cause.
            with contextlib.suppress(WorkerDied):
                worker = worker or self._start()
                if worker.grade(isolation.CORRECT, prepare(isolation.CORRECT)).passed:
                    return Verdict("crashed", f"{last_error} in each of {_ATTEMPTS} attempts")
            raise RunError(f"the sandbox's workers keep dying: {last_error}; check the machine's free memory")
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


_pool: Pool | None = None
_requested: tuple[Settings, str | None] = (Settings(), None)
"""Arguments of the last `start`, used if `run` must restart the pool."""
_lock = threading.RLock()


def start(settings: Settings | None = None, tier: str | None = None) -> str:
    """Select an isolation that works on this machine, test it with escape attempts, and keep it for `run`.

    Args:
        settings: limits of programs, and the number of workers.
        tier: `landlock` or `bubblewrap`; None selects the first one that works.

    Returns:
        One line that describes the isolation and the limits, for the terminal and for reports.

    Raises:
        UserError: no isolation works and `settings.allow_unsafe` is False.
    """
    global _pool, _requested
    settings = settings or Settings()
    tiers = (tier,) if tier else isolation.TIERS
    failures: dict[str, str] = {}
    with _lock:
        stop()
        _requested = settings, tier
        for name in tiers:
            pool = Pool(settings, name)
            try:
                failure = isolation.unavailable_reason(name) or isolation.self_test_failure(pool.run)
            except RunError as error:
                failure = str(error)
            if failure is None:
                _pool = pool
                return pool.describe()
            pool.close()
            failures[name] = failure

        if not settings.allow_unsafe or sys.platform != "linux":
            tried = "; ".join(f"{name}: {failure}" for name, failure in failures.items())
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
    if _pool is not None:
        for worker in _pool.workers:
            for zygote in worker.zygotes.values():
                zygote.control.close()
    _pool = None
    _lock = threading.RLock()


atexit.register(stop)
os.register_at_fork(after_in_child=_drop_in_child)
