"""Exceptions that end a command: a user error (exit code 2), a failed run (exit code 1), or a signal."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in flags, files or data. The message is one line: problem, received value, expected value, and fix."""

    exit_code = 2


class RunError(Exception):
    """The run failed after it started. The message is one line: problem, received value, expected value, and fix."""

    exit_code = 1


class Interrupted(BaseException):
    """SIGTERM or Ctrl-C stopped the run. Like KeyboardInterrupt, `except Exception` does not catch it."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type if the message is empty.

    A first line that only announces the reason, "validation failed:", is joined with the next one.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if lines[0].endswith(":") and len(lines) > 1:
        return f"{lines[0]} {lines[1]}"
    return lines[0]


def one_line(error: BaseException) -> str:
    """Return the type and the whole message of an exception in one line, of our own ones only the message."""
    message = " ".join(str(error).split())
    if isinstance(error, UserError | RunError):
        return message
    return f"{type(error).__name__}: {message}"


def suggestion(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return what may be meant by a misspelled name: "did you mean 'gsm8k'?", else `otherwise` or all known names."""
    known = list(known)
    close_names = difflib.get_close_matches(name, known, n=1)
    if close_names:
        return f"did you mean {close_names[0]!r}?"
    return otherwise or f"expected one of {', '.join(known)}"
