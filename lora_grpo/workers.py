"""Calls functions in a process that is killed when a call takes too long, whatever it does."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from lora_grpo.errors import RunError


class TooSlow(Exception):
    """A call did not end within the time limit."""


class Worker:
    """A process that calls one function, started by the first call. Arguments and results are JSON values.

    Signals cannot stop code in C, and reach only the main thread. A process can always be killed.

    Args:
        function: "module:name".
        seconds: time limit of a call.
        imports: modules that the function imports, so that the first call does not.
    """

    def __init__(self, function: str, seconds: float, imports: Sequence[str] = ()) -> None:
        self._function = function
        self._seconds = seconds
        self._imports = imports
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        _workers.add(self)

    def __call__(self, *arguments: Any) -> Any:
        """Return the result of the function.

        Raises:
            TooSlow: the call took too long.
            RuntimeError: the function raised an exception, or ended its process.
        """
        with self._lock:
            process = self._process or self._start()
            assert process.stdin and process.stdout

            # The answer is a line. A process that is killed for being late ends it without one.
            is_late = threading.Event()

            def stop() -> None:
                is_late.set()
                process.kill()

            timer = threading.Timer(self._seconds, stop)
            timer.start()
            try:
                process.stdin.write(json.dumps(arguments) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            except BaseException:  # Ctrl-C, or an Environment's time limit; the next call would read this one's answer
                process.kill()
                process.wait()
                self._process = None
                raise
            finally:
                timer.cancel()
            if not answer:
                process.wait()
                self._process = None
                if is_late.is_set():
                    raise TooSlow(f"{self._function} took more than {self._seconds:g} s")
                raise RuntimeError(f"{self._function} ended its process")

            result, error = json.loads(answer)
            if error is not None:
                raise RuntimeError(error)
            return result

    def close(self) -> None:
        """End the process. The next call starts another one."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                for stream in (self._process.stdin, self._process.stdout):
                    if stream is not None:
                        with contextlib.suppress(BrokenPipeError):
                            stream.close()
                self._process = None

    def _start(self) -> subprocess.Popen[str]:
        code = f"from lora_grpo.workers import serve; serve({self._function!r}, {list(self._imports)!r})"
        command = [sys.executable, "-P", "-W", "ignore::SyntaxWarning", "-c", code]  # -P: no module of this folder
        # In a session of its own, so that Ctrl-C reaches only the caller. It ends with its standard input, when the
        # caller ends. The order of sets is that of every other worker: some libraries draw from sets.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        assert process.stdout
        if not process.stdout.readline():  # the imports are not a part of a call
            raise RunError(f"{self._function} cannot be imported in a process of its own; its error is above")
        self._process = process
        return process


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def close_all() -> None:
    """End the processes of all workers of this process."""
    for worker in list(_workers):
        worker.close()


def serve(function: str, imports: Sequence[str]) -> None:
    """Call a function for each line of standard input. The main program of a worker's process."""
    # What the function prints must not mix with the results.
    results = sys.stdout
    sys.stdout = sys.stderr

    for module_name in imports:
        importlib.import_module(module_name)
    module_name, _, name = function.partition(":")
    call = getattr(importlib.import_module(module_name), name)
    print("ready", file=results, flush=True)
    for line in sys.stdin:
        try:
            answer = [call(*json.loads(line)), None]
        except Exception as error:  # noqa: BLE001 - reported to the caller
            answer = [None, f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), file=results, flush=True)
