"""The tests' process: run the tests against the candidate's functions, which run in another process."""

import builtins
import marshal
from typing import Any

from lora_grpo.sandbox import evalplus  # noqa: F401 - the tests import it, and there are no files then
from lora_grpo.sandbox.candidate import describe
from lora_grpo.sandbox.link import FROM_CANDIDATE, Gone, Link, remote

ASSERTS = "__lora_grpo_asserts__"
"""The name under which the tests find an `Assert` for each assert statement; `exam` inserts its use."""


class Assert:
    """An assert statement of the tests, as a context manager: the tests continue after it has failed."""

    def __init__(self, errors: list[BaseException]) -> None:
        self.errors = errors
        self.held: set[bool] = set()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.held.add(error is None)
        if error:
            self.errors.append(error)
        return isinstance(error, Exception)  # the candidate's exit ends the tests


def examine(exam: bytes, descriptor: int) -> dict[str, Any]:
    """Run tests that `exam.prepare` compiled against the candidate at the other end of a socket.

    The status `broken` means wrong tests: they failed without the candidate, or in a way that a correct candidate does
    not cause. It counts only for a reference program, because the tests may also lack memory on a busy machine.
    """
    prelude, code, functions, test, num_tests = marshal.loads(exam)
    link, errors = Link(descriptor), list[BaseException]()
    asserts = [Assert(errors) for _ in range(num_tests)]
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    status, message = "passed", ""
    try:
        exec(prelude, namespace)
        namespace.update({name: remote(link, name) for name in functions}, **{ASSERTS: asserts})
        link.reply()
        exec(code, namespace)
        if link.gone:  # the test caught all exceptions, including BaseException
            raise link.gone
        if errors:
            raise errors[0]
        if not link.used:
            status, message = "broken", "they never use the candidate"
    except Gone as gone:
        status, message = gone.status, gone.message
    except BaseException as error:  # noqa: BLE001 - reported
        status, message = _blame(errors[0] if errors else error, test, link)
    # The candidate's text may contain terminal control characters.
    message = "".join(letter if letter.isprintable() else " " for letter in message[:500])
    passed = sum(one.held == {True} for one in asserts)  # it ran, and held every time
    return {"status": status, "message": message, "passed_tests": passed, "num_tests": num_tests}


def _blame(error: BaseException, test: str, link: Link) -> tuple[str, str]:
    """Return the status and message for the exception that ended the tests."""
    notes = [note for note in getattr(error, "__notes__", ()) if str(note).startswith(FROM_CANDIDATE)]
    text = str(notes[0]).removeprefix(FROM_CANDIDATE) if notes else describe(error)
    if notes and not text.partition(":")[0].encode(errors="replace").isalpha():  # a class named like an assert
        text = f"Exception: {text}"
    if isinstance(error, MemoryError):
        return "memory", text
    if notes:
        return ("blocked" if isinstance(error, PermissionError) else "failed"), text
    if isinstance(error, (ModuleNotFoundError, NameError)) or not link.used:
        return "broken", text
    line, trace = 0, error.__traceback__
    while trace:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<test>" else line
        trace = trace.tb_next
    source = test.split("\n")[line - 1].strip() if line else ""
    if isinstance(error, AssertionError):
        detail = text.partition(": ")[2]
        return "failed", f"{source}  # {detail}" if detail else source
    return "failed", f"{text}, in {source}"
