"""The tests' side: runs them for real, with the candidate's functions answering from another process."""

from __future__ import annotations

import builtins
import itertools
import marshal
from collections import deque
from collections.abc import Iterator
from typing import Any

from lora_grpo.sandbox.codec import MAX_ITEMS, Decoder, Encoder, Malformed, receive, send

Report = dict[str, Any]
"""`status`, `message`, `passed_tests`, `num_tests`; the status `broken` blames the tests."""


class Gone(BaseException):
    """The candidate is out of the game. No `except Exception` of a test catches it.

    Args:
        status: the verdict's.
        message: the verdict's.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class NotPlain(Exception):
    """The tests pass a candidate what cannot cross, such as a function of theirs."""


class Link:
    """Asks the candidate's process.

    Args:
        descriptor: of the socket to it.
    """

    def __init__(self, descriptor: int) -> None:
        self.asked = 0
        self.gone: Gone | None = None
        self._descriptor = descriptor

    def open(self) -> None:
        """Wait until the candidate's source has run.

        Raises:
            Gone: it is no program, or died.
            Exception: what its top level raised.
        """
        reply = self._receive("ready", "invalid", "raised")
        if reply[0] == "invalid":
            raise self._lose("invalid", reply[1])
        if reply[0] == "raised":
            self._raise(reply, Decoder(self._remote))

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Return what the candidate's process answers; arguments that it changed in place are changed here.

        Raises:
            Gone: it died, left, or answered nonsense.
            NotPlain: an argument cannot cross.
            Exception: what the operation raised there, as the nearest builtin exception.
        """
        if self.gone:
            raise self.gone
        self.asked += 1
        encoder = Encoder(lambda value: self._handle(encoder, value))
        request = [
            operation,
            [encoder.encode(value) for value in args],
            [[name, encoder.encode(value)] for name, value in kwargs.items()],
        ]
        try:
            send(self._descriptor, request)
        except OSError:
            raise self._lose("crashed", "its process ended") from None
        except OverflowError as error:
            raise self._lose("failed", f"too much to be passed on: {error}") from None
        reply = self._receive("returned", "raised")
        decoder = Decoder(self._remote, encoder.nodes)
        try:
            for number, contents in reply[1]:
                decoder.replace(encoder.nodes[number], contents)
            if reply[0] == "returned":
                return decoder.decode(reply[2])
        except (Malformed, LookupError, TypeError, ValueError) as error:
            raise self._lose("failed", f"a malformed answer: {error}") from None
        return self._raise(reply, decoder, may_stop=operation == "next")

    def _receive(self, *expected: str) -> list[Any]:
        """Return a reply that is one of the expected ones and has all its parts."""
        try:
            reply = receive(self._descriptor)
        except (EOFError, OSError):
            raise self._lose("crashed", "its process ended") from None
        except Malformed as error:
            raise self._lose("failed", f"a malformed answer: {error}") from None
        known = isinstance(reply, list) and reply and reply[0] in expected
        if not known or [type(part) for part in reply[1:]] not in _REPLIES[reply[0]]:
            raise self._lose("failed", "a malformed answer")
        return reply

    def _raise(self, reply: list[Any], decoder: Decoder, may_stop: bool = False) -> None:
        """Raise what the candidate raised, as the nearest class that this process knows too."""
        _, _, kinds, text, encoded = reply
        known = [getattr(builtins, kind, None) for kind in kinds if isinstance(kind, str)]
        nearest = [kind for kind in known if isinstance(kind, type) and issubclass(kind, BaseException)]
        # Only `next` may end an iteration of the tests: `all(map(...))` would take it for the end of the cases.
        if not nearest or not issubclass(nearest[0], Exception) or (StopIteration in nearest and not may_stop):
            raise self._lose("failed", text)
        try:
            args = decoder.decode(encoded)
        except Malformed as cause:
            raise self._lose("failed", f"a malformed answer: {cause}") from None
        error: BaseException = Exception(text)
        for kind in nearest:
            try:
                error = kind(*args)
                break
            except (TypeError, ValueError):  # it wants other arguments, as the candidate's own subclass did
                continue
        error.add_note(_FROM_CANDIDATE + text)
        raise error

    def _handle(self, encoder: Encoder, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["handle", object.__getattribute__(value, "_key")]
        if isinstance(value, Iterator):
            return ["iterator", [encoder.encode(item, 1) for item in itertools.islice(value, MAX_ITEMS)]]
        if isinstance(value, (list, tuple, dict, set, frozenset, deque)):
            # Perhaps the candidate's own answer to an earlier call, so that it is no error of the data set.
            raise self._lose("failed", f"a {type(value).__name__} too deep or too large to be passed on")
        raise NotPlain(f"a {type(value).__name__} of the tests cannot be passed to the candidate")

    def _remote(self, key: Any, *_: Any) -> Remote:
        if type(key) is not int:
            raise ValueError(f"no handle: {key!r}")
        return Remote(self, key)

    def _lose(self, status: str, message: str) -> Gone:
        self.gone = Gone(status, message)
        return self.gone


_FROM_CANDIDATE = "raised by the candidate: "
_REPLIES: dict[str, list[list[type]]] = {
    "ready": [[]],
    "invalid": [[str]],
    "returned": [[list, kind] for kind in (type(None), bool, int, float, str, list)],
    "raised": [[list, list, str, list]],
}
"""The types of each reply's parts."""


class Remote:
    """An object, or a global name, of the candidate.

    It equals nothing but itself, and `in` looks through its items here: the candidate never sees an expected value.
    """

    __slots__ = ("_key", "_link")

    def __init__(self, link: Link, key: int | str) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_key", key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(self, "call", *args, **kwargs)

    def __iter__(self) -> Any:
        return _ask(self, "iter")

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __len__(self) -> int:
        return _ask(self, "len")

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "setitem", key, value)

    def __bool__(self) -> bool:
        return _ask(self, "truth")

    def __str__(self) -> str:
        return _ask(self, "text")

    def __repr__(self) -> str:
        return _ask(self, "repr")


def _ask(remote: Remote, operation: str, *args: Any, **kwargs: Any) -> Any:
    link: Link = object.__getattribute__(remote, "_link")
    return link.ask(operation, remote, *args, **kwargs)


def examine(exam: bytes, descriptor: int) -> Report:
    """Run the tests and report.

    Args:
        exam: what `exam.prepare` made of the tests.
        descriptor: of the socket to the candidate.
    """
    prelude, code, functions, test, num_tests = marshal.loads(exam)
    link, count = Link(descriptor), _Count(num_tests)
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    try:
        exec(prelude, namespace)
    except Exception as error:  # noqa: BLE001 - reported
        return _report("broken", f"{type(error).__name__}: {error}", count)
    namespace.update({name: Remote(link, name) for name in functions}, _held=count.held, _failed=count.failed)
    status, message = "passed", ""
    try:
        link.open()
        exec(code, namespace)
        if link.gone:  # a test that catches everything, BaseException too
            raise link.gone
        if count.first:
            raise count.first
    except Gone as gone:
        status, message = gone.status, gone.message
    except BaseException as error:  # noqa: BLE001 - reported
        status, message = _blame(error, test, link)
    return _report(status, message, count)


def _blame(error: BaseException, test: str, link: Link) -> tuple[str, str]:
    """Return status and message for an exception that ended the tests."""
    notes = [note for note in getattr(error, "__notes__", ()) if str(note).startswith(_FROM_CANDIDATE)]
    theirs, detail = bool(notes), _text(error)
    text = str(notes[0]).removeprefix(_FROM_CANDIDATE) if theirs else f"{type(error).__name__}: {detail}"
    if isinstance(error, MemoryError):
        return "memory", text
    if theirs:
        return ("blocked" if isinstance(error, PermissionError) else "failed"), text
    if isinstance(error, (NotPlain, ModuleNotFoundError)) or not link.asked:
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
    """Return the exception's text; it may hold a candidate's values, whose texts may fail."""
    try:
        return str(error)
    except BaseException as second:  # noqa: BLE001 - said instead
        return f"(its text raises {type(second).__name__})"


def _report(status: str, message: str, count: _Count) -> Report:
    # A candidate's text may hold what moves a terminal's cursor.
    message = "".join(letter if letter.isprintable() else " " for letter in message[:500])
    return {"status": status, "message": message, "passed_tests": count.passed, "num_tests": count.number}


class _Count:
    """Keeps count of the asserts, where the tests were prepared for it.

    One that ran several times holds if it did each time; one that never ran does not.
    """

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

    def failed(self, number: int, error: Exception) -> None:
        self._failed.add(number)
        self.first = self.first or error
