"""A pair of zygotes that grades one program at a time."""

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys

from lora_grpo.sandbox.launch import memory_file, start_process
from lora_grpo.sandbox.verdict import LONGEST, BrokenTest, Program, Settings, Verdict
from lora_grpo.sandbox.zygote import STATUS_BYTES

_ROLES = ("candidate", "examiner")
_START_SECONDS, _KILL_SECONDS = 60.0, 10.0
_MAX_REPORT_BYTES = 1 << 16


class WorkerDied(Exception):
    """A process of the pair exited or does not respond. Its program has no verdict and never passes."""


class CandidateKilled(WorkerDied):
    """The candidate was killed, or closed its socket. The pair can grade it again."""


class Worker:
    """A pair of zygotes. One forks candidates, and the other forks their tests."""

    def __init__(self, isolation: str, settings: Settings) -> None:
        self._settings = settings
        memory = settings.memory_mb << 20
        # The CPU limit is a fallback. The wall time limit is reached first.
        seconds = math.ceil(max(settings.timeout_seconds, LONGEST)) + 1
        self._processes: list[subprocess.Popen[bytes]] = []
        self.controls: dict[str, socket.socket] = {}
        try:
            for role, share in zip(_ROLES, (1, 2), strict=True):
                process, self.controls[role] = start_process(role, isolation, share * memory, seconds)
                self._processes.append(process)
            for role, process in zip(_ROLES, self._processes, strict=True):
                _wait_ready(self.controls[role], process)
        except BaseException as error:
            self.kill()
            if isinstance(error, (OSError, subprocess.SubprocessError)):
                raise WorkerDied(str(error)) from None
            raise

    def grade(self, program: Program, exam: bytes) -> Verdict:
        """Run one program with its tests, compiled by `exam.prepare`. After WorkerDied, the pair cannot be used.

        The exception is CandidateKilled, after which both children are reaped as after a verdict.
        """
        limit = max(self._settings.timeout_seconds, program.seconds)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._submit(program, exam, theirs.fileno())
            output = self._listen(ours, limit)
        # Always kill and reap both children before anything else runs.
        ends = self._stop()
        if output is None:
            return Verdict("timeout", f"still running after {limit:g} s")
        return self._decide(output, ends, program)

    def kill(self) -> None:
        """Kill both processes and their children."""
        for control in self.controls.values():
            # If another thread is waiting on the socket, close() alone does not close it.
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)
            control.close()
        for process in self._processes:
            # Kill the process group, because bubblewrap's outer process is not the parent of the others.
            with process, contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _submit(self, program: Program, exam: bytes, report: int) -> None:
        source = program.source.encode(errors="surrogatepass")
        for_candidate, for_tests = socket.socketpair()
        with for_candidate, for_tests:
            sent = (source, [for_candidate.fileno()]), (exam, [for_tests.fileno(), report])
            for role, (payload, descriptors) in zip(_ROLES, sent, strict=True):
                file = memory_file(payload)
                try:
                    socket.send_fds(self.controls[role], [b"R"], [file, *descriptors])
                except OSError as error:
                    raise WorkerDied(f"the {role}'s process exited ({error})") from None
                finally:
                    os.close(file)

    def _listen(self, report: socket.socket, limit: float) -> bytes | None:
        """Return the output of the tests, which is empty if they died, or None after `limit` seconds."""
        poll = select.poll()  # unlike `select`, it takes descriptors above 1023
        for end in (report, *self.controls.values()):
            poll.register(end, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(limit * 1000)]
        if report.fileno() in ready:
            return report.recv(_MAX_REPORT_BYTES)
        if ready:
            raise WorkerDied("a process of the sandbox was killed")
        return None

    def _stop(self) -> dict[str, int]:
        """Kill both children and return their wait statuses."""
        try:
            for control in self.controls.values():
                control.sendall(b"K")
            answers = {role: self.controls[role].recv(STATUS_BYTES, socket.MSG_WAITALL) for role in _ROLES}
        except OSError as error:  # includes timeouts
            raise WorkerDied(f"a process of the sandbox does not respond ({error})") from None
        if any(len(answer) < STATUS_BYTES for answer in answers.values()):
            raise WorkerDied("a process of the sandbox was killed")
        return {role: int.from_bytes(answer, sys.byteorder) for role, answer in answers.items()}

    def _decide(self, output: bytes, ends: dict[str, int], program: Program) -> Verdict:
        """Derive the verdict from the tests' output and the wait statuses. Empty output never passes."""
        if not output:
            code = os.waitstatus_to_exitcode(ends["examiner"])
            if code >= 0 or code == -signal.SIGKILL:
                raise WorkerDied("the tests' process exited without output")
            return Verdict("crashed", f"the process of its tests was killed: {signal.strsignal(-code)}")
        report = json.loads(output)
        status, message = report["status"], report["message"]
        if status == "broken":
            if program.reference:
                raise BrokenTest(f"the tests of {program.name} cannot run: {message}")
            status = "failed"
        if status == "crashed":  # the candidate closed its socket, so its process has ended or was killed just now
            code = os.waitstatus_to_exitcode(ends["candidate"])
            if code >= 0:
                message = f"its process exited with code {code}"
            elif code == -signal.SIGSYS:
                status, message = "blocked", "it made a system call that the sandbox forbids"
            elif code == -signal.SIGKILL:  # by the kernel, if other programs use all memory, or by `_stop`
                raise CandidateKilled("its process was killed or closed its socket")
            else:
                message = f"its process was killed: {signal.strsignal(-code)}"
        return Verdict(status, message, report["passed_tests"], report["num_tests"])


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
    control.settimeout(_KILL_SECONDS)
