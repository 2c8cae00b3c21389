"""What goes into the sandbox and what comes out: programs, their settings, verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lora_grpo.errors import RunError

Status = Literal["passed", "failed", "timeout", "memory", "crashed", "blocked", "invalid"]


@dataclass(frozen=True)
class Settings:
    """How programs are run."""

    workers: int | None = None
    """Programs graded at once; None takes one a CPU core."""
    timeout_seconds: float = 3.0
    """Wall time of one program with all its tests, in seconds."""
    memory_mb: int = 512
    """Address space of one program, in MiB; what its tests compare may take as much again."""
    allow_unsafe: bool = False
    """Where neither Landlock nor bubblewrap can shut programs in: run them all the same, as you. Every report says so.
    """


@dataclass(frozen=True)
class Program:
    """One candidate and the tests that decide about it."""

    source: str
    """The candidate: untrusted Python, run in a process that never sees the tests."""
    test: str
    """Python run in another process."""
    functions: tuple[str, ...]
    """The candidate's names in the tests: the entry point, and helpers or classes where the tests use them. No other
    name is the candidate's to define."""
    prelude: str = ""
    """Code the tests may lean on, such as a prompt's helper functions; run before `test`, trusted like it."""
    count_tests: bool = False
    """Run every assert of `test` though earlier ones failed, and count. The verdict passes only if all of them do."""
    name: str = "a program"
    """Which data set row this is, for messages."""


@dataclass(frozen=True)
class Verdict:
    """What became of one program."""

    status: Status
    """`passed`; `failed`: a wrong answer or an exception; `timeout`; `memory`; `crashed`: its process died; `blocked`:
    it tried what the sandbox forbids; `invalid`: it is not a Python program."""
    message: str
    """One line: the failing assertion, the exception, what was tried. Empty for a pass."""
    seconds: float
    """Wall time from hand-over to verdict."""
    passed_tests: int = 0
    """Assert statements that held each time they ran; 0 without `count_tests`, and where no verdict came."""
    num_tests: int = 0
    """Assert statements of the tests that say anything about the candidate; 0 without `count_tests`."""

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return self.status == "passed"


class BrokenTest(RunError):
    """A row's tests cannot run, whatever the candidate: an error of the data set, never a score of 0."""
