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
from typing import cast

from lora_grpo.sandbox.examiner import Report
from lora_grpo.sandbox.launch import Zygote, start_zygote
from lora_grpo.sandbox.memory_file import memory_file
from lora_grpo.sandbox.verdict import MAX_PROGRAM_SECONDS, BrokenTest, Program, Settings, Status, Verdict
from lora_grpo.sandbox.zygote import STATUS_BYTES

_MEMORY_FACTORS = {"candidate": 1, "examiner": 2}
"""The roles of the pair, and the address space of each in multiples of `Settings.memory_mb`."""
_START_SECONDS = 60.0
_KILL_SECONDS = 10.0
_MAX_REPORT_BYTES = 1 << 16


class WorkerDied(Exception):
    """A process of the pair exited or does not respond. Its program has no verdict and never passes."""


class CandidateKilled(WorkerDied):
    """The candidate was killed, or closed its socket. The pair can grade it again."""


class Worker:
    """A pair of zygotes. One forks candidates, and the other forks their tests."""

    def __init__(self, tier: str, settings: Settings) -> None:
        self._settings = settings
        memory_bytes = settings.memory_mb << 20
        # The CPU limit is a fallback. The wall time limit is reached first.
        cpu_seconds = math.ceil(max(settings.timeout_seconds, MAX_PROGRAM_SECONDS)) + 1
        self.zygotes: dict[str, Zygote] = {}
        try:
            # Start both before waiting for either.
            for role, factor in _MEMORY_FACTORS.items():
                self.zygotes[role] = start_zygote(role, tier, factor * memory_bytes, cpu_seconds)
            for zygote in self.zygotes.values():
                _wait_ready(zygote)
        except BaseException as error:
            self.kill()
            if isinstance(error, (OSError, subprocess.SubprocessError)):
                raise WorkerDied(str(error)) from None
            raise

    def grade(self, program: Program, exam: bytes) -> Verdict:
        """Run one program with its tests, compiled by `exam.prepare`.

        Raises:
            CandidateKilled: the pair can grade again; both children are reaped, as after a verdict.
            WorkerDied: the pair cannot be used again.
            BrokenTest: the tests cannot run with the reference program.
        """
        limit = max(self._settings.timeout_seconds, program.seconds)
        our_end, report_end = socket.socketpair()
        with our_end:
            with report_end:
                self._submit(program, exam, report_end.fileno())
            output = self._listen(our_end, limit)
        # Always kill and reap both children before anything else runs.
        wait_statuses = self._stop()
        if output is None:
            return Verdict("timeout", f"still running after {limit:g} s")
        return self._decide(output, wait_statuses, program)

    def kill(self) -> None:
        """Kill both processes and their children."""
        for zygote in self.zygotes.values():
            # If another thread is waiting on the socket, close() alone does not close it.
            with contextlib.suppress(OSError):
                zygote.control.shutdown(socket.SHUT_RDWR)
            zygote.control.close()
        for zygote in self.zygotes.values():
            # Kill the process group, because bubblewrap's outer process is not the parent of the others.
            with zygote.process, contextlib.suppress(ProcessLookupError):
                os.killpg(zygote.process.pid, signal.SIGKILL)

    def _submit(self, program: Program, exam: bytes, report_end: int) -> None:
        """Let each zygote fork a child for its half of the work. The children get the two ends of a new socket."""
        source = program.source.encode(errors="surrogatepass")
        candidate_end, tests_end = socket.socketpair()
        with candidate_end, tests_end:
            self._fork_child("candidate", source, [candidate_end.fileno()])
            self._fork_child("examiner", exam, [tests_end.fileno(), report_end])

    def _fork_child(self, role: str, payload: bytes, descriptors: list[int]) -> None:
        file = memory_file(payload)
        try:
            socket.send_fds(self.zygotes[role].control, [b"R"], [file, *descriptors])
        except OSError as error:
            raise WorkerDied(f"the {role}'s process exited ({error})") from None
        finally:
            os.close(file)

    def _listen(self, report: socket.socket, limit: float) -> bytes | None:
        """Return the output of the tests, which is empty if they died, or None after `limit` seconds."""
        poll = select.poll()  # unlike `select`, it takes descriptors above 1023
        poll.register(report, select.POLLIN)
        for zygote in self.zygotes.values():
            poll.register(zygote.control, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(limit * 1000)]
        if report.fileno() in ready:
            return report.recv(_MAX_REPORT_BYTES)
        if ready:
            raise WorkerDied("a process of the sandbox was killed")
        return None

    def _stop(self) -> dict[str, int]:
        """Kill both children and return their wait statuses by role."""
        replies: dict[str, bytes] = {}
        try:
            for zygote in self.zygotes.values():
                zygote.control.sendall(b"K")
            for role, zygote in self.zygotes.items():
                replies[role] = zygote.control.recv(STATUS_BYTES, socket.MSG_WAITALL)
        except OSError as error:  # includes timeouts
            raise WorkerDied(f"a process of the sandbox does not respond ({error})") from None
        if any(len(reply) < STATUS_BYTES for reply in replies.values()):
            raise WorkerDied("a process of the sandbox was killed")
        return {role: int.from_bytes(reply, sys.byteorder) for role, reply in replies.items()}

    def _decide(self, output: bytes, wait_statuses: dict[str, int], program: Program) -> Verdict:
        """Derive the verdict from the tests' output and the wait statuses. Empty output never passes."""
        if not output:
            exit_code = os.waitstatus_to_exitcode(wait_statuses["examiner"])
            if exit_code >= 0 or exit_code == -signal.SIGKILL:
                raise WorkerDied("the tests' process exited without output")
            return Verdict("crashed", f"the process of its tests was killed: {signal.strsignal(-exit_code)}")

        report = Report(*json.loads(output))
        status = report.status
        message = report.message
        if status == "broken":
            if program.reference:
                raise BrokenTest(f"the tests of {program.name} cannot run: {message}")
            status = "failed"
        elif status == "crashed":
            # The candidate closed its socket, so its process has ended or was killed just now. A negative exit code is
            # the number of a signal.
            exit_code = os.waitstatus_to_exitcode(wait_statuses["candidate"])
            if exit_code >= 0:
                message = f"its process exited with code {exit_code}"
            elif exit_code == -signal.SIGSYS:
                status = "blocked"
                message = "it made a system call that the sandbox forbids"
            elif exit_code == -signal.SIGKILL:  # by the kernel, if other programs use all memory, or by `_stop`
                raise CandidateKilled("its process was killed or closed its socket")
            else:
                message = f"its process was killed: {signal.strsignal(-exit_code)}"
        return Verdict(cast(Status, status), message, report.passed_tests, report.num_tests)


def _wait_ready(zygote: Zygote) -> None:
    """Wait until a zygote serves commands, or raise WorkerDied with the last line of its errors."""
    zygote.control.settimeout(_START_SECONDS)
    try:
        answer = zygote.control.recv(1)
    except OSError:
        answer = b""
    if answer != b"!":
        zygote.process.kill()
        assert zygote.process.stderr is not None
        errors = zygote.process.stderr.read().decode(errors="replace").strip().splitlines()
        raise WorkerDied(errors[-1] if errors else "a process of the sandbox did not start")
    zygote.control.settimeout(_KILL_SECONDS)
