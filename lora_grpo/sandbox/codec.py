"""Encode values sent between a candidate and its tests: plain data as JSON, any other object as a handle.

Decoding never runs code from the other end. Numbers, text, bytes, and the standard containers are rebuilt from JSON, so
an instance of a subclass with a custom `__eq__` becomes a plain value. Any other object becomes a handle that is equal
only to itself. Containers passed to a call keep their identity: if the callee modifies or returns one, the caller's
object is modified or returned.

A frame is the length in four bytes (little-endian), followed by JSON. A container is encoded as `[tag, ...]`:

    ["list", [...]]  ["dict", [[...], [...]]]  ["int", "0x..."]  ["again", 3]  ["handle", 7, ["iter", "next"]]

Mutable containers are numbered in the order in which they are encoded. `again` refers to such a number.
"""

import builtins
import json
import os
from collections import Counter, OrderedDict, deque
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
        if issubclass(kind, float):
            return float.__float__(value)
        if issubclass(kind, str):
            return str.__str__(value)
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        if isinstance(value, type) and _TYPES.get(name := value.__name__) is value:
            return ["type", name]
        if kind.__qualname__ in _REBUILT and kind.__module__ == _REBUILT[kind.__qualname__][0]:
            return [kind.__qualname__, *map(self.encode, _REBUILT[kind.__qualname__][1](value))]
        base: Any = _base(kind)
        if base is None or depth >= MAX_DEPTH or self._items > MAX_ITEMS:
            return self._handle(value)
        if base.__name__ in _FILLED:
            self._numbers[id(value)] = len(self.nodes)
            self.nodes.append(value)
        return [base.__name__, self.contents(value, depth)]

    def contents(self, value: Any, depth: int = 0) -> Any:
        """Return only the encoded contents of a container."""
        if isinstance(value, dict):
            return [self._encode_all(list(part(value)), depth) for part in (dict.keys, dict.values)]
        return self._encode_all(list(_base(type(value)).__iter__(value)), depth)

    def _encode_all(self, items: list[Any], depth: int) -> list[Any]:
        """Return the encoded items of a container. This is fast for long lists of JSON scalars."""
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
        if tag in _REBUILT:
            arguments = [self.decode(item) for item in rest]
            if not {int, *_SAME_IN_JSON}.issuperset(map(type, arguments)):  # a constructor might call a handle
                raise ValueError(f"the arguments of {tag}")
            # A program that uses none of these modules does not import them.
            kind = getattr(import_module(_REBUILT[tag][0]), tag)
            return getattr(kind, "fromisoformat", kind)(*arguments)
        match tag:
            case "int":
                return int(rest[0], 16)
            case "again":
                return self.nodes[rest[0]]
            case "handle":
                return self._handle(*rest)
            case "type":
                return _TYPES[rest[0]]
        raise ValueError(f"an unknown value: {data!r:.80}")

    def _decode_all(self, data: Any) -> Any:
        """Return the decoded items of a container. JSON scalars are returned unchanged."""
        kinds = set(map(type, data))
        return [self.decode(item) for item in data] if list in kinds or dict in kinds else data

    def fill(self, node: Any, data: Any) -> Any:
        """Replace the contents of a container with those encoded in `data`, and return it."""
        # Decode the items before clearing the node, because a node may contain itself.
        if isinstance(node, dict):
            items: Any = dict(zip(*map(self._decode_all, data), strict=True))
        else:
            items = self._decode_all(data)
        node.clear()
        (node.update if isinstance(node, (dict, set)) else node.extend)(items)
        return node


PREDICATES = {name for kind in (str, bytes, set, int, float) for name in dir(kind) if name.startswith("is")}
PREDICATES |= {"startswith", "endswith"}
"""Methods of plain values that compare them with their arguments, or only return a truth value. A result that is not
plain data does not have them. Otherwise, `result.startswith("six")` would send the expected value to the candidate."""


def _base(kind: type) -> Any:
    """Return the container type that the type is or extends, or None."""
    return kind if kind in _CONTAINERS else next((base for base in _CONTAINERS if issubclass(kind, base)), None)


_FILLED = {kind.__name__: kind for kind in (list, Counter, OrderedDict, dict, set, deque, bytearray)}
"""Mutable containers. A subclass comes before its base class."""
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "frozenset": frozenset,
    "bytes": bytes,
    "iterator": iter,
    "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: dict(items).items(),
}
_CONTAINERS = dict.fromkeys(
    [*_FILLED.values(), tuple, frozenset, bytes, *map(type, ({}.keys(), {}.values(), {}.items()))]
)
_TYPES: dict[str, type] = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and kind.__module__ == "builtins"
}
_REBUILT: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    **dict.fromkeys(("range", "slice"), ("builtins", lambda value: (value.start, value.stop, value.step))),
    "complex": ("builtins", lambda value: (value.real, value.imag)),
    "Decimal": ("decimal", lambda value: (str(value),)),
    "Fraction": ("fractions", lambda value: (value.numerator, value.denominator)),
    "timedelta": ("datetime", lambda value: (value.days, value.seconds, value.microseconds)),
    **dict.fromkeys(("date", "datetime", "time"), ("datetime", lambda value: (value.isoformat(),))),
}
"""Other values: their module, and the arguments of their type or of its `fromisoformat`."""
