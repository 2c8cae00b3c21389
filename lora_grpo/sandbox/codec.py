"""Encode values sent between a candidate and its tests: plain data as JSON, any other object as a handle.

Decoding never runs code from the other end. Numbers, text, bytes, and the standard containers are rebuilt from JSON, so
an instance of a subclass with a custom `__eq__` becomes a plain value. Any other object becomes a handle that is equal
only to itself. Containers passed to a call keep their identity: if the callee modifies or returns one, the caller's
object is modified or returned.

A frame is the length in four bytes (little-endian), followed by JSON. A container is encoded as `[tag, ...]`:

    ["list", [...]]  ["dict", [[...], [...]]]  ["int", "0x..."]  ["again", 3]  ["handle", 7, ["iter", "next"]]

Mutable containers are numbered in the order in which they are encoded. `again` refers to such a number.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

MAX_FRAME_BYTES = 64 << 20
MAX_DEPTH = 100
MAX_ITEMS = 1_500_000
"""Items of all containers of a message. Items that are encoded together count less; see `Encoder._encode_all`."""

_PLAIN = (bool, float, str)
_SAME_IN_JSON = {*_PLAIN, type(None)}
_SMALL_INT = 1 << 62
MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Exceptions while receiving or decoding data that is not in this module's format."""

_to_json = json.JSONEncoder(separators=(",", ":")).encode


def send(descriptor: int, message: Any) -> None:
    """Write one frame. Raise OverflowError if it is longer than MAX_FRAME_BYTES."""
    body = _to_json(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise OverflowError(f"a message of {len(body)} bytes; expected at most {MAX_FRAME_BYTES}")
    frame = memoryview(len(body).to_bytes(4, "little") + body)
    while frame:
        frame = frame[os.write(descriptor, frame) :]


def receive(descriptor: int) -> Any:
    """Read one frame. Raise EOFError if the other end is closed, and one of MALFORMED if the frame is not valid."""
    length = int.from_bytes(_read(descriptor, 4), "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(_read(descriptor, length))


def _read(descriptor: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 16))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class Encoder:
    """Encode the values of one message. `nodes` are the containers that the other end already has, by number."""

    def __init__(self, handle: Callable[[Any], Any], nodes: Iterable[Any] = ()) -> None:
        self.nodes = list(nodes)
        self._handle = handle
        self._numbers = {id(node): number for number, node in enumerate(self.nodes)}
        self._items = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Return the value as JSON. A container that is too deep or too large becomes a handle."""
        kind = type(value)
        if value is None or kind in _PLAIN:
            return value
        if issubclass(kind, int):
            number = int.__index__(value)
            return number if -_SMALL_INT < number < _SMALL_INT else ["int", hex(number)]
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        if issubclass(kind, float):
            return float.__float__(value)
        if issubclass(kind, str):
            return str.__str__(value)
        tag = _tag(value)
        if tag is None:
            return self._handle(value)
        if tag in _SCALARS:
            return [tag, *_SCALARS[tag][0](value)]
        if tag in _LATE:
            return [tag, *_LATE[tag][1](value)]
        if depth >= MAX_DEPTH or self._items > MAX_ITEMS:
            return self._handle(value)
        if isinstance(value, _NUMBERED):
            self._numbers[id(value)] = len(self.nodes)
            self.nodes.append(value)
        if tag == "namedtuple":
            return [tag, type(value).__name__, list(type(value)._fields), self.contents(value, depth)]
        return [tag, self.contents(value, depth)]

    def contents(self, value: Any, depth: int = 0) -> Any:
        """Return only the encoded contents of a container."""
        if isinstance(value, bytearray):
            return value.hex()
        if isinstance(value, dict):
            return [self._encode_all(list(part(value)), depth) for part in (dict.keys, dict.values)]
        kind = type(value)
        base = kind if kind in _ITERATED else next(base for base in _ITERATED if issubclass(kind, base))
        return self._encode_all(list(base.__iter__(value)), depth)

    def _encode_all(self, items: list[Any], depth: int) -> list[Any]:
        """Return the encoded items of a container. If JSON has them all as they are, this is fast, for long lists."""
        kinds = set(map(type, items))
        plain = kinds <= _SAME_IN_JSON
        if plain or (kinds <= {int, bool} and min(items) > -_SMALL_INT and max(items) < _SMALL_INT):
            self._items += len(items) // 16
            return items
        self._items += len(items)
        return [self.encode(item, depth + 1) for item in items]


class Decoder:
    """Decode the values of one message. `nodes` are the containers that both ends already have, by number."""

    def __init__(self, handle: Callable[..., Any], nodes: Iterable[Any] = ()) -> None:
        self.nodes = list(nodes)
        self._handle = handle

    def decode(self, data: Any) -> Any:
        """Return the decoded value. Raise one of MALFORMED if the data is not in this module's format."""
        if type(data) is not list:
            if isinstance(data, dict):
                raise ValueError("a JSON object")
            return data
        tag, *rest = data
        if tag in _FILLED:
            self.nodes.append(_FILLED[tag]())
            return self.fill(self.nodes[-1], rest[0])
        if tag in _FROM_ITEMS:
            return _FROM_ITEMS[tag](self._decode_all(rest[0]))
        if tag == "namedtuple":
            return _named_tuple(rest[0], *rest[1])(*self._decode_all(rest[2]))
        if tag == "again":
            return self.nodes[_natural(rest[0])]
        if tag == "handle":
            return self._handle(*rest)
        if tag in _LATE:
            module, _, build = _LATE[tag]
            return build(getattr(import_module(module), tag), *rest)
        return _SCALARS[tag][1](*rest)

    def _decode_all(self, data: Any) -> Any:
        """Return the decoded items of a container. JSON scalars are returned unchanged."""
        kinds = set(map(type, data))
        return [self.decode(item) for item in data] if list in kinds or dict in kinds else data

    def fill(self, node: Any, data: Any) -> Any:
        """Replace the contents of a container with those encoded in `data`, and return it."""
        if isinstance(node, bytearray):
            node[:] = bytes.fromhex(data)
            return node
        # Decode the items before clearing the node, because a node may contain itself.
        if isinstance(node, dict):
            keys, values = map(self._decode_all, data)
            items = dict(zip(keys, values, strict=True))
        else:
            items = self._decode_all(data)
        node.clear()
        if isinstance(node, (dict, set)):
            node.update(items)
        else:
            node.extend(items)
        return node


def _builtin_type(name: Any) -> type:
    kind = vars(builtins)[name]
    if not isinstance(kind, type) or kind.__module__ != "builtins":  # `__loader__` is a class too
        raise ValueError(f"{name!r} is not a builtin type")
    return kind


PREDICATES = {name for kind in (str, bytes, set, int, float) for name in dir(kind) if name.startswith("is")}
PREDICATES |= {"startswith", "endswith"}
"""Methods of plain values that compare them with their arguments, or only return a truth value. A result that is not
plain data does not have them. Otherwise, `result.startswith("six")` would send the expected value to the candidate."""


@functools.lru_cache(maxsize=64)
def _named_tuple(name: str, *fields: str) -> type:
    """Return a named tuple type. `namedtuple` renames fields that are not identifiers; so are those in PREDICATES."""
    return namedtuple(name, ["_" if field in PREDICATES else field for field in fields], rename=True)


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not the number of a container")
    return number


def _tag(value: Any) -> str | None:
    """Return the tag of the value's plain type or base type, or None if there is no tag."""
    kind = type(value)
    if kind in _EXACT:
        return _EXACT[kind]
    if kind.__qualname__ in _LATE and kind.__module__ == _LATE[kind.__qualname__][0]:
        return str(kind.__qualname__)
    if isinstance(value, type):
        return "type" if getattr(builtins, value.__name__, None) is value else None
    if isinstance(value, tuple) and type(getattr(kind, "_fields", None)) is tuple:
        return "namedtuple"
    return next((name for base, name in _EXACT.items() if issubclass(kind, base)), None)


_VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_ITERATED: tuple[type[Any], ...] = (list, tuple, set, frozenset, deque, *_VIEWS)
# A subclass comes before its base class.
_BASES: tuple[type[Any], ...] = (Counter, OrderedDict, *_ITERATED, dict, bytearray, bytes, range, complex, slice)
_EXACT: dict[type, str] = {kind: kind.__name__ for kind in _BASES}
_FILLED = {kind.__name__: kind for kind in (list, deque, set, Counter, OrderedDict, dict, bytearray)}
_NUMBERED = (list, dict, set, deque, bytearray)
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "frozenset": frozenset,
    "iterator": iter,
    "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: dict(items).items(),
}
# How to take a value apart into values of JSON, and how to build it from them.
_SCALARS: dict[str, tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    "int": (lambda value: (hex(value),), lambda text: int(text, 16)),
    "bytes": (lambda value: (bytes.hex(value),), bytes.fromhex),
    "type": (lambda value: (value.__name__,), _builtin_type),
    "range": (lambda value: (value.start, value.stop, value.step), range),
    "slice": (lambda value: (value.start, value.stop, value.step), slice),
    "complex": (lambda value: (value.real, value.imag), complex),
}
# The same with the module. Programs that do not use these modules do not import them.
_LATE: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    "Decimal": ("decimal", lambda value: (str(value),), lambda kind, text: kind(text)),
    "Fraction": (
        "fractions",
        lambda value: (hex(value.numerator), hex(value.denominator)),
        lambda kind, top, bottom: kind(int(top, 16), int(bottom, 16)),
    ),
    "timedelta": ("datetime", lambda value: (value.days, value.seconds, value.microseconds), lambda kind, *n: kind(*n)),
    **dict.fromkeys(
        ("date", "datetime", "time"),
        ("datetime", lambda value: (value.isoformat(),), lambda kind, text: kind.fromisoformat(text)),
    ),
}
