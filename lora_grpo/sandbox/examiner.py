"""The tests' process: run the tests against the candidate's functions, which run in another process."""

from __future__ import annotations

import builtins
import marshal
from typing import Any

from lora_grpo.sandbox.link import FROM_CANDIDATE, Gone, Link, NotPlain, remote

HELD, FAILED, ERROR = "__lora_grpo_held__", "__lora_grpo_failed__", "__lora_grpo_error__"
"""Names of the functions that counted asserts call, and of the exception. `exam` inserts the calls."""

Report = dict[str, Any]
"""`status`, `message`, `passed_tests`, and `num_tests`.

The status `broken` blames the tests: they failed without the candidate, or in a way that a correct candidate does not
cause. It counts only if the candidate is the reference, because the tests may also lack memory on a busy machine.
"""


def examine(exam: bytes, descriptor: int) -> Report:
    """Run tests that `exam.prepare` compiled against the candidate at the other end of a socket."""
    prelude, imports, code, functions, test, num_tests = marshal.loads(exam)
    link, count = Link(descriptor), _Count(num_tests)
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    try:
        exec(prelude, namespace)
        exec(imports, namespace)
    except Exception as error:  # noqa: BLE001 - reported
        return _report("broken", f"{type(error).__name__}: {error}", count)
    namespace.update({name: remote(link, name) for name in functions}, **{HELD: count.held, FAILED: count.failed})
    status, message = "passed", ""
    try:
        link.open()
        exec(code, namespace)
        if link.gone:  # the test caught all exceptions, including BaseException
            raise link.gone
        if count.first:
            raise count.first
        if not link.used:
            status, message = "broken", "they never use the candidate"
    except Gone as gone:
        status, message = gone.status, gone.message
    except BaseException as error:  # noqa: BLE001 - reported
        status, message = _blame(count.first or error, test, link)
    return _report(status, message, count)


def _blame(error: BaseException, test: str, link: Link) -> tuple[str, str]:
    """Return the status and message for the exception that ended the tests."""
    notes = [note for note in getattr(error, "__notes__", ()) if str(note).startswith(FROM_CANDIDATE)]
    theirs, detail = bool(notes), _text(error)
    text = str(notes[0]).removeprefix(FROM_CANDIDATE) if theirs else f"{type(error).__name__}: {detail}"
    if isinstance(error, MemoryError):
        return "memory", text
    if theirs:
        return ("blocked" if isinstance(error, PermissionError) else "failed"), text
    if isinstance(error, (NotPlain, ModuleNotFoundError)) or not link.used:
        return "broken", text
    line, trace = 0, error.__traceback__
    while trace:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<test>" else line
        trace = trace.tb_next
    source = test.split("\n")[line - 1].strip() if line else ""
    if isinstance(error, AssertionError):
        return "failed", f"{source}  # {detail}" if detail else source
    return "failed", f"{text}, in {source}"


def _text(error: BaseException) -> str:
    """Return the exception's text. It may include the candidate's values, so formatting it may raise."""
    try:
        return str(error)
    except BaseException as second:  # noqa: BLE001 - reported instead
        return f"(its text raises {type(second).__name__})"


def _report(status: str, message: str, count: _Count) -> Report:
    # The candidate's text may contain terminal control characters.
    message = "".join(letter if letter.isprintable() else " " for letter in message[:500])
    return {"status": status, "message": message, "passed_tests": count.passed, "num_tests": count.number}


class _Count:
    """Count the asserts that run and pass every time they run. One that the candidate's exit interrupts fails."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.first: Exception | None = None
        self._held: set[int] = set()
        self._failed: set[int] = set()

    @property
    def passed(self) -> int:
        return len(self._held - self._failed)

    def held(self, number: int) -> None:
        self._held.add(number)

    def failed(self, number: int, error: BaseException) -> None:
        self._failed.add(number)
        if not isinstance(error, Exception):
            raise error
        self.first = self.first or error
