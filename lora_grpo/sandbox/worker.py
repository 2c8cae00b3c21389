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

from lora_grpo.sandbox.launch import memory_file, start_process
from lora_grpo.sandbox.verdict import BrokenTest, Program, Settings, Status, Verdict
from lora_grpo.sandbox.zygote import ANSWER_BYTES, how_it_ended

_ROLES = ("candidate", "examiner")
_START_SECONDS, _KILL_SECONDS = 60.0, 10.0
_MAX_REPORT_BYTES = 1 << 16
_ATTEMPTS = 3
"""How often a program may run if its process or that of its tests is killed from outside."""


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
        """Run one program with its tests, compiled by `exam.prepare`. After WorkerDied, the pair cannot be used.

        A program that is killed from outside, such as by the kernel because other programs use all memory, runs again.
        """
        started = time.monotonic()
        for _ in range(_ATTEMPTS):
            output, ends = self._run(program, exam)
            verdict = _decide(output, ends, program, self._settings, time.monotonic() - started)
            if not _killed_from_outside(verdict, ends):
                break
        return verdict

    def _run(self, program: Program, exam: bytes) -> tuple[bytes | None, dict[str, tuple[bool, int]]]:
        """Return the results of `_listen` and `_stop`."""
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
        """Return the output of the tests' process, which may be empty, or None after a timeout."""
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

    def _stop(self) -> dict[str, tuple[bool, int]]:
        """Kill both children. For each, return whether it was still running and its wait status."""
        try:
            for control in self._controls.values():
                control.sendall(b"K")
            ends = {}
            for role, control in self._controls.items():
                answer = control.recv(ANSWER_BYTES, socket.MSG_WAITALL)
                if len(answer) < ANSWER_BYTES:
                    raise WorkerDied(f"the {role}'s process was killed")
                ends[role] = how_it_ended(answer)
            return ends
        except OSError as error:  # includes timeouts
            raise WorkerDied(f"a process of the sandbox does not respond ({error})") from None


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
    output: bytes | None, ends: dict[str, tuple[bool, int]], program: Program, settings: Settings, seconds: float
) -> Verdict:
    """Derive the verdict from the tests' output and the exit status of the children. Empty output never passes."""
    if output is None:
        return Verdict("timeout", f"still running after {settings.timeout_seconds:g} s", seconds)
    if not output.endswith(b"\n"):
        killed, wait_status = ends["examiner"]
        if killed or not os.WIFSIGNALED(wait_status):
            raise WorkerDied("the tests' process exited without output")
        return Verdict("crashed", f"the process of its tests was killed by {_signal(wait_status)}", seconds)
    report = json.loads(output)
    status, message = report["status"], report["message"]
    if status == "broken" and program.reference:
        raise BrokenTest(f"the tests of {program.name} cannot run: {message}")
    if status == "broken":
        status = "failed"
    if status == "crashed":
        status, message = _how_it_ended(*ends["candidate"])
    return Verdict(status, message, seconds, report["passed_tests"], report["num_tests"])


def _killed_from_outside(verdict: Verdict, ends: dict[str, tuple[bool, int]]) -> bool:
    """Return whether a child died of a SIGKILL that its zygote did not send."""
    if verdict.status not in ("memory", "crashed"):
        return False
    died = {role: os.WIFSIGNALED(end) and os.WTERMSIG(end) == signal.SIGKILL for role, (_, end) in ends.items()}
    # A candidate that is being killed may have closed its socket and still count as running.
    ours = {"candidate": ends["candidate"][0] and verdict.status == "memory", "examiner": ends["examiner"][0]}
    return any(died[role] and not ours[role] for role in _ROLES)


def _how_it_ended(killed: bool, status: int) -> tuple[Status, str]:
    """Interpret the wait status of a candidate that closed its socket to the tests."""
    if not os.WIFSIGNALED(status):
        return "crashed", f"its process exited with code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGSYS:
        return "blocked", "it made a system call that the sandbox forbids"
    if number == signal.SIGKILL:
        return ("crashed", "it closed its socket") if killed else ("memory", "killed for using too much memory")
    return "crashed", f"its process was killed by {_signal(status)}"


def _signal(status: int) -> str:
    try:
        return signal.Signals(os.WTERMSIG(status)).name
    except ValueError:
        return f"signal {os.WTERMSIG(status)}"
