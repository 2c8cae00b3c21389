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
_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Exceptions while decoding data that is not in this module's format."""
_FILLED = {kind.__name__: kind for kind in (list, deque, set, Counter, OrderedDict, dict, bytearray)}
_NUMBERED = (list, dict, set, deque, bytearray)

_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Malformed(Exception):
    """The data received is not a valid frame or value."""


def send(descriptor: int, message: Any) -> None:
    """Write one frame. Raise OverflowError if it is longer than MAX_FRAME_BYTES."""
    body = _to_json(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise OverflowError(f"a message of {len(body)} bytes; expected at most {MAX_FRAME_BYTES}")
    frame = memoryview(len(body).to_bytes(4, "little") + body)
    while frame:
        frame = frame[os.write(descriptor, frame) :]


def receive(descriptor: int) -> Any:
    """Read one frame. Raise EOFError if the other end is closed, and Malformed if the frame is not valid."""
    length = int.from_bytes(_read(descriptor, 4), "little")
    if length > MAX_FRAME_BYTES:
        raise Malformed(f"a message of {length} bytes")
    try:
        return json.loads(_read(descriptor, length))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from None


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
            return [tag, *_SCALARS[tag](value)]
        if tag == "slice":
            return [tag, *(self.encode(part, depth + 1) for part in (value.start, value.stop, value.step))]
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
        """Return the decoded value. Raises Malformed if the data is not in this module's format."""
        try:
            return self._decode(data)
        except _ERRORS as error:
            raise Malformed(f"invalid value: {type(error).__name__}: {error}") from None

    def replace(self, node: Any, data: Any) -> None:
        """Replace the contents of an existing container with those encoded in `data`."""
        try:
            self._fill(node, data, clear=True)
        except _ERRORS as error:
            raise Malformed(f"invalid contents: {type(error).__name__}: {error}") from None

    def _decode(self, data: Any) -> Any:
        if type(data) is not list:
            if isinstance(data, dict):
                raise ValueError("a JSON object")
            return data
        tag, *rest = data
        if tag in _FILLED:
            node: Any = _FILLED[tag]()
            self.nodes.append(node)
            self._fill(node, rest[0])
            return node
        if tag in _FROM_ITEMS:
            return _FROM_ITEMS[tag](self._decode_all(rest[0]))
        if tag == "namedtuple":
            return _named_tuple(rest[0], *rest[1])(*self._decode_all(rest[2]))
        if tag == "again":
            return self.nodes[_natural(rest[0])]
        if tag == "slice":
            return slice(*map(self._decode, rest))
        if tag == "handle":
            return self._handle(*rest)
        return _BUILD[tag](*rest)

    def _decode_all(self, data: Any) -> Any:
        """Return the decoded items of a container. Items of JSON's scalar types are what they are."""
        kinds = set(map(type, data))
        return [self._decode(item) for item in data] if list in kinds or dict in kinds else data

    def _fill(self, node: Any, data: Any, clear: bool = False) -> None:
        if isinstance(node, bytearray):
            node[:] = bytes.fromhex(data)
            return
        # Decode the items before clearing the node, because a node may contain itself.
        if isinstance(node, dict):
            keys, values = map(self._decode_all, data)
            if clear:
                node.clear()
            for key, item in zip(keys, values, strict=True):
                node[key] = item
            return
        items = self._decode_all(data)
        if clear:
            node.clear()
        if isinstance(node, set):
            node.update(items)
        else:
            node.extend(items)


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
    name = _EXACT.get(type(value)) or _LATE.get((type(value).__module__, type(value).__qualname__))
    if name is None and isinstance(value, type):
        return "type" if getattr(builtins, value.__name__, None) is value else None
    if name is None and isinstance(value, tuple) and type(getattr(type(value), "_fields", None)) is tuple:
        return "namedtuple"
    if name is None:
        name = next((name for kind, name in _EXACT.items() if issubclass(type(value), kind)), None)
    return name


_VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_ITERATED: tuple[type[Any], ...] = (list, tuple, set, frozenset, deque, *_VIEWS)
# A subclass comes before its base class.
_BASES: tuple[type[Any], ...] = (Counter, OrderedDict, *_ITERATED, dict, bytearray, bytes, range, complex, slice)
_EXACT: dict[type, str] = {kind: kind.__name__ for kind in _BASES}
# Listed by name, so that programs that do not use these modules do not import them.
_LATE = {
    ("decimal", "Decimal"): "Decimal",
    ("fractions", "Fraction"): "Fraction",
    ("datetime", "date"): "date",
    ("datetime", "datetime"): "datetime",
    ("datetime", "time"): "time",
    ("datetime", "timedelta"): "timedelta",
    ("pathlib", "PosixPath"): "PosixPath",
    ("pathlib", "PurePosixPath"): "PurePosixPath",
    ("uuid", "UUID"): "UUID",
}
_SCALARS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "bytes": lambda value: (bytes.hex(value),),
    "type": lambda value: (value.__name__,),
    "range": lambda value: (value.start, value.stop, value.step),
    "complex": lambda value: (value.real, value.imag),
    "Decimal": lambda value: (str(value),),
    "Fraction": lambda value: (hex(value.numerator), hex(value.denominator)),
    "date": lambda value: (value.isoformat(),),
    "datetime": lambda value: (value.isoformat(),),
    "time": lambda value: (value.isoformat(),),
    "timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "PosixPath": lambda value: (str(value),),
    "PurePosixPath": lambda value: (str(value),),
    "UUID": lambda value: (value.hex,),
}
_BUILD: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "type": _builtin_type,
    "range": range,
    "complex": complex,
    "Decimal": lambda text: import_module("decimal").Decimal(text),
    "Fraction": lambda top, bottom: import_module("fractions").Fraction(int(top, 16), int(bottom, 16)),
    "date": lambda text: import_module("datetime").date.fromisoformat(text),
    "datetime": lambda text: import_module("datetime").datetime.fromisoformat(text),
    "time": lambda text: import_module("datetime").time.fromisoformat(text),
    "timedelta": lambda *parts: import_module("datetime").timedelta(*parts),
    "PosixPath": lambda text: import_module("pathlib").PosixPath(text),
    "PurePosixPath": lambda text: import_module("pathlib").PurePosixPath(text),
    "UUID": lambda text: import_module("uuid").UUID(text),
}
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "frozenset": frozenset,
    "iterator": iter,
    "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: dict(items).items(),
}
