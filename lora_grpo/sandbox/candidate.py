"""The candidate's process: run the source, then serve requests from the tests."""

import builtins
import functools
import operator
import sys
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any

from lora_grpo.sandbox.codec import Decoder, Encoder, receive, send

_MAX_TEXT_LENGTH = 300


@functools.cache
def _event_loop() -> Any:
    """Return one event loop for all objects that the tests await, as if the tests ran in it."""
    return import_module("asyncio").new_event_loop()  # imported only if it is used


async def _next_item(generator: Any) -> Any:
    """Return the next item. This is a coroutine, as an event loop requires; `anext(generator)` is not."""
    return await anext(generator)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "bool": bool,
    "str": str,
    "repr": repr,
    "await": lambda coroutine: _event_loop().run_until_complete(coroutine),
    "anext": lambda generator: _event_loop().run_until_complete(_next_item(generator)),
}
"""Operations that tests may request on the candidate's objects. `==` and `in` would reveal expected values."""

ABILITIES = ("call", "iter", "next", "len", "getitem", "setitem")
"""Operations that are special methods of the same name. A handle lists those that its object has."""

ASYNCHRONOUS = {"await": types.CoroutineType, "anext": types.AsyncGeneratorType}
"""Operations for objects of one type, whose handles list nothing else."""


class _Objects:
    """Objects for which the tests have handles."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._objects: list[Any] = []
        self._number_of_id: dict[int, int] = {}

    def handle(self, value: Any) -> list[Any]:
        """Return the object's handle."""
        if id(value) not in self._number_of_id:
            self._number_of_id[id(value)] = len(self._objects)
            self._objects.append(value)  # alive, so that no other object gets its id
        number = self._number_of_id[id(value)]

        for operation, kind in ASYNCHRONOUS.items():
            if type(value) is kind:
                return ["handle", number, [operation]]
        methods = {name for kind in type(value).__mro__ for name in vars(kind)}
        abilities = [name for name in ABILITIES if f"__{name}__" in methods]
        return ["handle", number, abilities]

    def find(self, key: int | str) -> Any:
        """Return the object with this number, or the candidate's global variable with this name."""
        if isinstance(key, int):
            return self._objects[key]
        if key not in self._namespace:
            raise NameError(f"name {key!r} is not defined")
        return self._namespace[key]


def run(source: bytes, link: int) -> None:
    """Execute the source, in UTF-8 that may include surrogates, and serve calls until the tests close the socket."""
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    objects = _Objects(module.__dict__)

    # The first reply is about the source.
    try:
        program = compile(source.decode(errors="surrogatepass"), "<candidate>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        send(link, ["invalid", describe(error)])
        return
    try:
        exec(program, module.__dict__)
        send(link, ["ready"])
    except BaseException as error:  # noqa: BLE001 - reported to the tests
        send(link, _raised(error, [], objects))
        return

    while True:
        try:
            request = receive(link)
        except EOFError:
            return
        try:
            send(link, _answer(request, objects))
        except OverflowError as error:
            send(link, _raised(error, [], objects))


def _answer(request: Any, objects: _Objects) -> list[Any]:
    """Execute a request of the form `[operation, [argument, ...], [[keyword, argument], ...]]`.

    Returns:
        `["returned", changes, value]`, or what `_raised` returns. The changes are `[[number, contents], ...]` of the
        containers among the arguments.
    """
    operation, encoded_args, encoded_kwargs = request
    changes: list[Any] = []
    decoder = Decoder(objects.find)
    try:
        args = [decoder.decode(value) for value in encoded_args]
        kwargs = {name: decoder.decode(value) for name, value in encoded_kwargs}
        encoder_before_call = Encoder(objects.handle, decoder.nodes)  # its encodings are only compared, not sent
        contents_before = [encoder_before_call.contents(node) for node in decoder.nodes]
        try:
            value = OPERATIONS[operation](*args, **kwargs)
        finally:
            # A call that raises may have changed its arguments, too.
            encoder = Encoder(objects.handle, decoder.nodes)
            contents_after = [encoder.contents(node) for node in decoder.nodes]
            changes = _changes(contents_before, contents_after)
        return ["returned", changes, encoder.encode(value)]
    except BaseException as error:  # noqa: BLE001 - reported to the tests
        return _raised(error, changes, objects)


def _changes(contents_before: list[Any], contents_after: list[Any]) -> list[Any]:
    """Return `[[number, contents], ...]` of the containers with new contents."""
    changes = []
    for number, (before, after) in enumerate(zip(contents_before, contents_after, strict=True)):
        # An argument may change from 1 to 1.0 or True, which are equal.
        if before != after or repr(before) != repr(after):
            changes.append([number, after])
    return changes


def _raised(error: BaseException, changes: list[Any], objects: _Objects) -> list[Any]:
    """Encode an exception: its builtin classes (nearest first), text, and arguments."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
    try:
        args = Encoder(objects.handle).encode(tuple(error.args))
    except BaseException:  # noqa: BLE001 - a candidate's own exception class
        args = ["tuple", []]
    return ["raised", changes, kinds, describe(error), args]


def describe(error: BaseException) -> str:
    """Return the class and the text of an exception. Its text may be made by the candidate's code, and so may raise."""
    try:
        text = str(error)[:_MAX_TEXT_LENGTH]
    except BaseException as second_error:  # noqa: BLE001 - a candidate's own __str__
        text = f"(its text raises {type(second_error).__name__})"
    return f"{type(error).__name__}: {text}"
