"""The tests' end of the socket: send requests to the candidate's process and proxy its objects."""

from __future__ import annotations

import builtins
import functools
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from lora_grpo.sandbox.candidate import ABILITIES
from lora_grpo.sandbox.codec import MALFORMED, MAX_ITEMS, PREDICATES, Decoder, Encoder, receive, send

FROM_CANDIDATE = "raised by the candidate: "
"""Prefix of the note that is added to exceptions raised by the candidate."""
_EXITED, _INVALID = "its process exited", "it sent an invalid reply"


class Gone(BaseException):
    """The candidate exited or misbehaved. Not a subclass of `Exception`, so that tests do not catch it."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class NotPlain(Exception):
    """The tests passed the candidate a value that cannot be encoded, such as a function."""


class Link:
    """Requests to the candidate's process."""

    def __init__(self, descriptor: int) -> None:
        self.used = False
        self.gone: Gone | None = None
        self._descriptor = descriptor

    def open(self) -> None:
        """Wait until the candidate's source has run. Its exceptions are re-raised here."""
        match self._receive():
            case ["ready"]:
                return
            case ["invalid", str(text)]:
                raise self._lose("invalid", text)
            case ["raised", [], list(kinds), str(text), encoded]:
                raise self._exception(kinds, text, self._decode(Decoder(self._remote), [], encoded))
        raise self._lose("failed", _INVALID)

    def ask(self, operation: str, remote: Remote, /, *args: Any, **kwargs: Any) -> Any:
        """Run an operation in the candidate's process and return its result.

        In-place changes to arguments are applied to the caller's objects. `candidate.OPERATIONS` lists the operations.
        The candidate's exceptions are converted to the nearest builtin class.
        """
        if self.gone:
            raise self.gone
        self.used = True
        encoder = Encoder(lambda value: self._handle(encoder, value))
        try:
            request = [
                operation,
                [encoder.encode(value) for value in (remote, *args)],
                [[name, encoder.encode(value)] for name, value in kwargs.items()],
            ]
        except NotPlain as error:
            if isinstance(object.__getattribute__(remote, "_key"), str):
                raise
            # A method of the candidate's own object. A builtin object in its place would accept any argument.
            raise self._lose("failed", str(error)) from None
        try:
            send(self._descriptor, request)
        except OSError:
            raise self._lose("crashed", _EXITED) from None
        except OverflowError as error:
            raise self._lose("failed", f"the arguments are too large: {error}") from None
        decoder = Decoder(self._remote, encoder.nodes)
        match self._receive():
            case ["returned", list(changes), encoded]:
                return self._decode(decoder, changes, encoded)
            case ["raised", list(changes), list(kinds), str(text), encoded]:
                args = self._decode(decoder, changes, encoded)
                raise self._exception(kinds, text, args, may_stop=operation == "next")
        raise self._lose("failed", _INVALID)

    def _receive(self) -> Any:
        try:
            return receive(self._descriptor)
        except (EOFError, OSError):
            raise self._lose("crashed", _EXITED) from None
        except MALFORMED as error:
            raise self._lose("failed", f"{_INVALID}: {error}") from None

    def _decode(self, decoder: Decoder, changes: list[Any], encoded: Any) -> Any:
        """Apply the changes to the caller's objects, and return the decoded value."""
        try:
            for number, contents in changes:
                decoder.fill(decoder.nodes[number], contents)
            return decoder.decode(encoded)
        except MALFORMED as error:
            raise self._lose("failed", f"{_INVALID}: {error}") from None

    def _exception(self, kinds: list[Any], text: str, args: Any, may_stop: bool = False) -> BaseException:
        """Return the candidate's exception as its nearest builtin class, or as Gone if the tests must not catch it."""
        known = [getattr(builtins, kind, None) for kind in kinds if isinstance(kind, str)]
        nearest = [kind for kind in known if isinstance(kind, type) and issubclass(kind, BaseException)]
        nearest = [kind for kind in nearest if not issubclass(kind, BaseExceptionGroup)]
        # Only `next` may end an iteration. `all(map(...))` in a test would treat StopIteration as the end of the cases.
        if not nearest or not issubclass(nearest[0], Exception) or (StopIteration in nearest and not may_stop):
            return self._lose("failed", text)
        kind, args = nearest[0], args if isinstance(args, tuple) else (args,)
        try:
            # Unicode errors with some arguments crash the interpreter when they are formatted.
            error = kind.__new__(kind) if issubclass(kind, UnicodeError) else kind(*args)
        except Exception:  # noqa: BLE001 - the constructor does not accept these arguments
            error = kind.__new__(kind)
        error.args = args
        error.add_note(FROM_CANDIDATE + text)
        return error

    def _handle(self, encoder: Encoder, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["handle", object.__getattribute__(value, "_key")]
        if isinstance(value, Iterator):
            return ["iterator", encoder.contents(list(itertools.islice(value, MAX_ITEMS)))]
        if isinstance(value, (list, tuple, dict, set, frozenset, deque)):
            # The value may be an earlier result of the candidate, so this is not an error in the dataset.
            raise self._lose("failed", f"a {type(value).__name__} is too deep or too large to send")
        raise NotPlain(f"the tests pass a {type(value).__name__}, which cannot be sent to the candidate")

    def _remote(self, key: Any, abilities: Any = ()) -> Remote:
        if type(key) is not int:
            raise ValueError(f"{key!r} is not a handle")
        return remote(self, key, frozenset(abilities).intersection(ABILITIES))

    def _lose(self, status: str, message: str) -> Gone:
        self.gone = Gone(status, message)
        return self.gone


class Remote:
    """An object or global name of the candidate. It is equal only to itself.

    Its class defines those of `ABILITIES` that the object's class defines, so `callable` and the like give the same
    result as for the object. `in` compares its items in the tests' process, so the candidate never receives an expected
    value.
    """

    __slots__ = ("_key", "_link")

    def __init__(self, link: Link, key: int | str) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_key", key)

    def __getattr__(self, name: str) -> Any:
        result = not isinstance(object.__getattribute__(self, "_key"), str)
        if (name.startswith("__") and name != "__name__") or (result and name in PREDICATES):
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)


def _method(operation: str) -> Any:
    return lambda self, /, *args, **kwargs: _ask(self, operation, *args, **kwargs)


_ALWAYS = {f"__{name}__": _method(name) for name in ("bool", "str", "repr")}


@functools.cache
def _remote_class(abilities: frozenset[str]) -> type[Remote]:
    methods = _ALWAYS | {f"__{name}__": _method(name) for name in abilities}
    return type("object of the candidate", (Remote,), {"__slots__": ()} | methods)


def remote(link: Link, key: int | str, abilities: frozenset[str] = frozenset(ABILITIES)) -> Remote:
    """Return a proxy for an object of the candidate."""
    return _remote_class(abilities)(link, key)


def _ask(remote: Remote, operation: str, /, *args: Any, **kwargs: Any) -> Any:
    link: Link = object.__getattribute__(remote, "_link")
    return link.ask(operation, remote, *args, **kwargs)
