"""A pair of zygotes that grades one program at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import time

from lora_grpo.sandbox.launch import start_process
from lora_grpo.sandbox.library import memory_file
from lora_grpo.sandbox.verdict import BrokenTest, Program, Settings, Verdict
from lora_grpo.sandbox.zygote import ANSWER_BYTES, wait_status

_ROLES = ("candidate", "examiner")
_START_SECONDS, _KILL_SECONDS = 60.0, 10.0
_MAX_REPORT_BYTES = 1 << 16
_ATTEMPTS = 3
"""How often a program may run if its process is killed, as the kernel does if other programs use all memory."""


class WorkerDied(Exception):
    """A process of the pair exited or does not respond. Its program has no verdict and never passes."""


class Worker:
    """A pair of zygotes. One forks candidates, and the other forks their tests."""

    def __init__(self, isolation: str, settings: Settings) -> None:
        self._settings = settings
        memory = settings.memory_mb << 20
        # The CPU limit is a fallback. The wall time limit is reached first.
        seconds = math.ceil(settings.timeout_seconds) + 1
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: dict[str, socket.socket] = {}
        try:
            for role, share in zip(_ROLES, (1, 2), strict=True):
                process, self._controls[role] = start_process(role, isolation, [share * memory, seconds])
                self._processes.append(process)
            for role, process in zip(_ROLES, self._processes, strict=True):
                _wait_ready(self._controls[role], process)
        except (OSError, subprocess.SubprocessError) as error:
            self.kill()
            raise WorkerDied(str(error)) from None
        except BaseException:
            self.kill()
            raise

    def grade(self, program: Program, exam: bytes) -> Verdict:
        """Run one program with its tests, compiled by `exam.prepare`. After WorkerDied, the pair cannot be used."""
        started = time.monotonic()
        for _ in range(_ATTEMPTS):
            output, ends = self._run(program, exam)
            verdict = _decide(output, ends, program, self._settings, time.monotonic() - started)
            if verdict.status != "crashed" or _signal(ends["candidate"]) != signal.SIGKILL:
                break
        return verdict

    def _run(self, program: Program, exam: bytes) -> tuple[bytes | None, dict[str, int]]:
        """Return the output of the tests, which may be empty, or None after a timeout; and both wait statuses."""
        report, report_end = os.pipe()
        try:
            try:
                self._submit(program, exam, report_end)
            finally:
                os.close(report_end)
            output = self._listen(report, time.monotonic() + self._settings.timeout_seconds)
        finally:
            os.close(report)
        # Always kill and reap both children before anything else runs.
        return output, self._stop()

    def kill(self) -> None:
        """Kill both processes and their children."""
        for control in self._controls.values():
            # If another thread is waiting on the socket, close() alone does not close it.
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)
            control.close()
        for process in self._processes:
            # Kill the process group, because bubblewrap's outer process is not the parent of the others.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stderr:
                process.stderr.close()

    def abandon(self) -> None:
        """Close the sockets in a forked child. The pair belongs to the parent."""
        for control in self._controls.values():
            control.close()

    def _submit(self, program: Program, exam: bytes, report_end: int) -> None:
        for_candidate, for_tests = socket.socketpair()
        with for_candidate, for_tests:
            source = program.source.encode(errors="surrogatepass")
            self._send("candidate", source, for_candidate.fileno())
            self._send("examiner", exam, for_tests.fileno(), report_end)

    def _send(self, role: str, payload: bytes, *descriptors: int) -> None:
        file = memory_file(payload)
        try:
            socket.send_fds(self._controls[role], [b"R"], [file, *descriptors])
        except OSError as error:
            raise WorkerDied(f"the {role}'s process exited ({error})") from None
        finally:
            os.close(file)

    def _listen(self, report: int, deadline: float) -> bytes | None:
        poll = select.poll()
        for descriptor in (report, *(control.fileno() for control in self._controls.values())):
            poll.register(descriptor, select.POLLIN)
        output = b""
        while not output.endswith(b"\n") and len(output) < _MAX_REPORT_BYTES:
            left = deadline - time.monotonic()
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, left) * 1000)]
            if report in ready:
                part = os.read(report, _MAX_REPORT_BYTES)
                if not part:
                    break
                output += part
            elif ready:
                raise WorkerDied("a process of the sandbox was killed")
            elif left <= 0:
                return None
        return output

    def _stop(self) -> dict[str, int]:
        """Kill both children and return their wait statuses."""
        try:
            for control in self._controls.values():
                control.sendall(b"K")
            answers = {role: self._controls[role].recv(ANSWER_BYTES, socket.MSG_WAITALL) for role in _ROLES}
        except OSError as error:  # includes timeouts
            raise WorkerDied(f"a process of the sandbox does not respond ({error})") from None
        if any(len(answer) < ANSWER_BYTES for answer in answers.values()):
            raise WorkerDied("a process of the sandbox was killed")
        return {role: wait_status(answer) for role, answer in answers.items()}


def _wait_ready(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.settimeout(_START_SECONDS)
    try:
        ready = control.recv(1)
    except OSError:
        ready = b""
    if ready != b"!":
        process.kill()
        output = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
        raise WorkerDied(output.splitlines()[-1] if output else "a process of the sandbox did not start")
    if process.stderr:
        process.stderr.close()
    control.settimeout(_KILL_SECONDS)


def _decide(
    output: bytes | None, ends: dict[str, int], program: Program, settings: Settings, seconds: float
) -> Verdict:
    """Derive the verdict from the tests' output and the wait statuses of the children. Empty output never passes."""
    if output is None:
        return Verdict("timeout", f"still running after {settings.timeout_seconds:g} s", seconds)
    if not output.endswith(b"\n"):
        number = _signal(ends["examiner"])
        if number in (0, signal.SIGKILL):
            raise WorkerDied("the tests' process exited without output")
        return Verdict("crashed", f"the process of its tests was killed by {_name(number)}", seconds)
    report = json.loads(output)
    status, message = report["status"], report["message"]
    if status == "broken":
        if program.reference:
            raise BrokenTest(f"the tests of {program.name} cannot run: {message}")
        status = "failed"
    if status == "crashed":  # the candidate closed its socket, so its process has ended or was killed just now
        number = _signal(ends["candidate"])
        if number == 0:
            message = f"its process exited with code {os.waitstatus_to_exitcode(ends['candidate'])}"
        elif number == signal.SIGSYS:
            status, message = "blocked", "it made a system call that the sandbox forbids"
        elif number == signal.SIGKILL:
            message = "it closed its socket, or was killed because memory ran out"
        else:
            message = f"its process was killed by {_name(number)}"
    return Verdict(status, message, seconds, report["passed_tests"], report["num_tests"])


def _signal(status: int) -> int:
    """Return the signal that ended a process, or 0 if it exited."""
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _name(number: int) -> str:
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
