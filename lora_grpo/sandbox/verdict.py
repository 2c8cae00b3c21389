"""The sandbox's inputs and outputs: programs, settings, verdicts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from lora_grpo.errors import RunError

MAX_PROGRAM_SECONDS = 60.0
"""Upper bound of `Program.seconds`."""

Status = Literal["passed", "failed", "timeout", "memory", "crashed", "blocked", "invalid"]


@dataclass(frozen=True)
class Settings:
    """Limits for the programs being graded."""

    workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Programs graded at once; None for one per CPU core."""
    timeout_seconds: Annotated[float, Field(ge=0.01, le=3600)] = 3.0
    """Wall time limit for one program and all of its tests, in seconds."""
    memory_mb: Annotated[int, Field(ge=64, le=1 << 20)] = 512
    """Address space limit for one program in MiB. Its tests get twice as much."""
    allow_unsafe: bool = False
    """If neither Landlock nor bubblewrap works, run programs without isolation, as your user. Every report says so."""


@dataclass(frozen=True)
class Program:
    """One candidate and its tests."""

    source: str
    """The candidate: untrusted Python that runs in a process without access to the tests."""
    test: str
    """Trusted Python that runs in another process. It continues after a failed assert, outside `try` and `with`."""
    functions: tuple[str, ...]
    """Names that the candidate defines for the tests: the entry point and any helpers or classes that the tests use."""
    prelude: str = ""
    """Trusted Python that runs before `test`, such as a prompt's helper functions."""
    reference: bool = False
    """The source is the dataset's own, so `BrokenTest` is raised if the tests cannot run with it. A model's program
    never raises it."""
    seconds: float = 0.0
    """Wall time limit in seconds, at most `MAX_PROGRAM_SECONDS`, if it is more than that of the settings."""
    name: str = "a program"
    """Id of the dataset row, for error messages."""


@dataclass(frozen=True)
class Verdict:
    """The result of one program."""

    status: Status
    """`passed`, `failed` (wrong answer or exception), `timeout`, `memory`, `crashed` (its process died), `blocked` (it
    tried something that the sandbox forbids), or `invalid` (not a Python program)."""
    message: str
    """One line with the failed assertion, the exception, or the blocked operation. Empty for a pass."""
    passed_tests: int = 0
    """Number of assert statements that passed every time they ran; 0 without a result."""
    num_tests: int = 0
    """Number of assert statements that use at least one name; 0 without a result."""

    @property
    def passed(self) -> bool:
        return self.status == "passed"


class BrokenTest(RunError):
    """A row's tests cannot run. This is an error in the dataset. No candidate can cause it; see `Program.reference`."""
