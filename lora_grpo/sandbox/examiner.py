"""The tests' process: run the tests against the candidate's functions, which run in another process."""

import builtins
import marshal
from types import CodeType
from typing import Any, NamedTuple

from lora_grpo.sandbox import evalplus  # noqa: F401 - the tests import it, and there are no files then
from lora_grpo.sandbox.candidate import describe
from lora_grpo.sandbox.link import FROM_CANDIDATE, Gone, Link, remote

ASSERTS = "__lora_grpo_asserts__"
"""The name under which the tests find an `Assert` for each assert statement; `exam` inserts its use."""

_MAX_MESSAGE_LENGTH = 500


class Exam(NamedTuple):
    """Tests that `exam.prepare` compiled. marshal stores it as a plain tuple."""

    prelude: CodeType
    """Runs before the candidate's functions are known."""
    test: CodeType
    functions: tuple[str, ...]
    """Names that the candidate defines."""
    test_source: str
    """The tests as text, for messages."""
    num_tests: int
    """Number of counted assert statements."""


class Report(NamedTuple):
    """What the tests' process writes at its end, as JSON. The verdict is decided with it; see `worker`."""

    status: str
    """A status of `verdict.Verdict`, or `broken` for wrong tests: they failed without the candidate, or in a way that a
    correct candidate does not cause. It counts only for a reference program, because the tests may also lack memory on
    a busy machine."""
    message: str
    passed_tests: int
    num_tests: int


class Assert:
    """An assert statement of the tests, as a context manager: the tests continue after it has failed."""

    def __init__(self, errors: list[BaseException]) -> None:
        self._errors = errors
        self._outcomes: set[bool] = set()

    @property
    def held_every_time(self) -> bool:
        """Whether it ran, and never failed."""
        return self._outcomes == {True}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._outcomes.add(error is None)
        if error:
            self._errors.append(error)
        return isinstance(error, Exception)  # the candidate's exit ends the tests


def examine(payload: bytes, descriptor: int) -> Report:
    """Run tests that `exam.prepare` compiled against the candidate at the other end of a socket."""
    exam = Exam(*marshal.loads(payload))
    link = Link(descriptor)
    errors: list[BaseException] = []
    asserts = [Assert(errors) for _ in range(exam.num_tests)]
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    status = "passed"
    message = ""
    try:
        exec(exam.prelude, namespace)
        for name in exam.functions:
            namespace[name] = remote(link, name)
        namespace[ASSERTS] = asserts
        link.reply()  # the candidate's source has run
        exec(exam.test, namespace)
        if link.gone:  # the test caught all exceptions, including BaseException
            raise link.gone
        if errors:
            raise errors[0]
        if not link.used:
            status = "broken"
            message = "they never use the candidate"
    except Gone as gone:
        status = gone.status
        message = gone.message
    except BaseException as error:  # noqa: BLE001 - reported
        first_error = errors[0] if errors else error
        status, message = _blame(first_error, exam.test_source, link)

    # The candidate's text may contain terminal control characters.
    message = "".join(letter if letter.isprintable() else " " for letter in message[:_MAX_MESSAGE_LENGTH])
    passed_tests = sum(counted.held_every_time for counted in asserts)
    return Report(status, message, passed_tests, exam.num_tests)


def _blame(error: BaseException, test_source: str, link: Link) -> tuple[str, str]:
    """Return the status and message for the exception that ended the tests."""
    notes = [note for note in getattr(error, "__notes__", ()) if str(note).startswith(FROM_CANDIDATE)]
    if notes:
        text = str(notes[0]).removeprefix(FROM_CANDIDATE)
        # The text begins with the name of the exception's class. A candidate may have chosen a name that reads as a
        # failed assert of the tests.
        class_name = text.partition(":")[0]
        if not class_name.encode(errors="replace").isalpha():
            text = f"Exception: {text}"
    else:
        text = describe(error)

    if isinstance(error, MemoryError):
        return "memory", text
    if notes and isinstance(error, PermissionError):
        return "blocked", text
    if notes:
        return "failed", text
    if isinstance(error, (ModuleNotFoundError, NameError)) or not link.used:
        return "broken", text

    statement = _last_statement(error, test_source)
    if not isinstance(error, AssertionError):
        return "failed", f"{text}, in {statement}"
    detail = text.partition(": ")[2]
    if detail:
        statement += f"  # {detail}"
    return "failed", statement


def _last_statement(error: BaseException, test_source: str) -> str:
    """Return the line of the tests that an exception passed last, or nothing if it passed none."""
    line = 0
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "<test>":
            line = trace.tb_lineno
        trace = trace.tb_next
    if not line:
        return ""
    return test_source.split("\n")[line - 1].strip()
