"""The tests' end of the socket: send requests to the candidate's process and proxy its objects."""

import builtins
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from lora_grpo.sandbox.candidate import ABILITIES, ASYNCHRONOUS
from lora_grpo.sandbox.codec import MALFORMED, MAX_ITEMS, PREDICATES, Decoder, Encoder, receive, send

FROM_CANDIDATE = "raised by the candidate: "
"""Prefix of the note that is added to exceptions raised by the candidate."""
_EXITED = "its process exited"
_TRUTH_AND_TEXT = ("bool", "str", "repr")
"""Operations that every object has."""


class Gone(BaseException):
    """The candidate exited or misbehaved. Not a subclass of `Exception`, so that tests do not catch it."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Link:
    """Requests to the candidate's process."""

    def __init__(self, descriptor: int) -> None:
        self.used = False
        """Whether the tests have requested anything."""
        self.gone: Gone | None = None
        """Why there is no candidate any more."""
        self._descriptor = descriptor
        self._awaitable_remotes: WeakKeyDictionary[Any, Remote] = WeakKeyDictionary()

    def ask(self, operation: str, remote: "Remote", /, *args: Any, **kwargs: Any) -> Any:
        """Run an operation in the candidate's process and return its result.

        `candidate.OPERATIONS` lists the operations. See `reply` for in-place changes and exceptions.
        """
        if self.gone:
            raise self.gone
        self.used = True

        def handle(value: Any) -> list[Any]:
            return self._handle(encoder, value)  # the encoder of this request also encodes the items of an iterator

        encoder = Encoder(handle)
        encoded_args = [encoder.encode(value) for value in (remote, *args)]
        encoded_kwargs = [[name, encoder.encode(value)] for name, value in kwargs.items()]
        try:
            send(self._descriptor, [operation, encoded_args, encoded_kwargs])
        except OSError:
            raise self._lose("crashed", _EXITED) from None
        except OverflowError as error:
            raise self._lose("failed", f"the arguments are too large: {error}") from None
        return self.reply(encoder.nodes, may_stop=operation == "next")

    def reply(self, arguments: Iterable[Any] = (), may_stop: bool = False) -> Any:
        """Receive a reply, apply its changes to the containers among the arguments, and return its value.

        The candidate's exceptions are raised as the nearest builtin class. The first reply says that its source ran.

        Args:
            arguments: the containers of the request, in the order of their numbers.
            may_stop: the candidate may raise StopIteration.
        """
        decoder = Decoder(self._remote, arguments)
        try:
            match receive(self._descriptor):
                case ["ready"]:
                    return None
                case ["invalid", str(text)]:
                    raise self._lose("invalid", text)
                case ["returned", changes, encoded_value]:
                    _apply(changes, decoder)
                    return decoder.decode(encoded_value)
                case ["raised", changes, kinds, str(text), encoded_args]:
                    _apply(changes, decoder)
                    args = decoder.decode(encoded_args)
                    error = self._exception(kinds, text, args, may_stop)
                case _:
                    raise ValueError("an unknown form")
        except (EOFError, OSError):
            raise self._lose("crashed", _EXITED) from None
        except MALFORMED as malformed:
            raise self._lose("failed", f"it sent an invalid reply: {malformed}") from None
        raise error

    def _exception(self, kinds: list[Any], text: str, args: Any, may_stop: bool) -> BaseException:
        """Return the candidate's exception as its nearest builtin class, or as Gone if the tests must not catch it."""
        builtin_kinds: list[type[BaseException]] = []
        for name in kinds:
            kind = getattr(builtins, name, None) if isinstance(name, str) else None
            if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, BaseExceptionGroup):
                builtin_kinds.append(kind)

        if not builtin_kinds or not issubclass(builtin_kinds[0], Exception):
            return self._lose("failed", text)
        # Only `next` may end an iteration. `all(map(...))` in a test would treat StopIteration as the end of the cases.
        if StopIteration in builtin_kinds and not may_stop:
            return self._lose("failed", text)

        nearest = builtin_kinds[0]
        if not isinstance(args, tuple):
            args = (args,)
        try:
            # Unicode errors with some arguments crash the interpreter when they are formatted.
            error = nearest.__new__(nearest) if issubclass(nearest, UnicodeError) else nearest(*args)
        except Exception:  # noqa: BLE001 - the constructor does not accept these arguments
            error = nearest.__new__(nearest)
        error.args = args
        error.add_note(FROM_CANDIDATE + text)
        return error

    def _handle(self, encoder: Encoder, value: Any) -> list[Any]:
        """Return the encoding of a value that is not plain data: an object of the candidate, or an iterator."""
        if isinstance(value, tuple(ASYNCHRONOUS.values())):
            value = self._awaitable_remotes.get(value, value)
        if isinstance(value, Remote):
            return ["handle", object.__getattribute__(value, "_key")]
        if isinstance(value, Iterator):
            return ["iterator", encoder.contents(list(itertools.islice(value, MAX_ITEMS)))]
        # For example a function, or a list that is too deep.
        raise self._lose("broken", f"the tests pass a {type(value).__name__}, which cannot be sent to the candidate")

    def _remote(self, key: Any, abilities: Any = ()) -> Any:
        """Return a proxy for the object of a handle that the candidate sent."""
        if type(key) is not int:
            raise ValueError(f"{key!r} is not a handle")
        operations = frozenset(abilities)
        proxy = remote(self, key, operations.intersection(ABILITIES))
        if not operations.intersection(ASYNCHRONOUS):
            return proxy
        # Some functions of asyncio take only coroutines and asynchronous generators of Python's own types, so one of
        # these stands for the proxy.
        awaitable = self._coroutine(proxy) if "await" in operations else self._asynchronous_generator(proxy)
        self._awaitable_remotes[awaitable] = proxy
        return awaitable

    async def _coroutine(self, proxy: "Remote") -> Any:
        """Run a coroutine of the candidate to its end, in the candidate's process."""
        return self.ask("await", proxy)

    async def _asynchronous_generator(self, proxy: "Remote") -> AsyncIterator[Any]:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield self.ask("anext", proxy)

    def _lose(self, status: str, message: str) -> Gone:
        """Return the exception that ends the tests. From now on, every request raises it."""
        self.gone = Gone(status, message)
        return self.gone


def _apply(changes: Any, decoder: Decoder) -> None:
    """Give the containers among the arguments of a request the contents that they have after it."""
    for number, contents in changes:
        decoder.fill(decoder.nodes[number], contents)


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
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        is_result = not isinstance(object.__getattribute__(self, "_key"), str)  # a global name has a string
        if is_result and name in PREDICATES:
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)


def _method(operation: str) -> Any:
    """Return a special method that runs an operation in the candidate's process."""
    return lambda self, /, *args, **kwargs: _ask(self, operation, *args, **kwargs)


@functools.cache
def _remote_class(abilities: frozenset[str]) -> type[Remote]:
    """Return the class of all proxies for objects with these abilities."""
    members: dict[str, Any] = {"__slots__": ()}
    for operation in (*_TRUTH_AND_TEXT, *abilities):
        members[f"__{operation}__"] = _method(operation)
    return type("object of the candidate", (Remote,), members)


def remote(link: Link, key: int | str, abilities: frozenset[str] = frozenset(ABILITIES)) -> Remote:
    """Return a proxy for an object of the candidate."""
    return _remote_class(abilities)(link, key)


def _ask(remote: Remote, operation: str, /, *args: Any, **kwargs: Any) -> Any:
    link: Link = object.__getattribute__(remote, "_link")
    return link.ask(operation, remote, *args, **kwargs)
