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
from typing import Any, NamedTuple

MAX_FRAME_BYTES = 64 << 20
MAX_DEPTH = 100
MAX_ITEMS = 1_500_000
"""Items of all containers of a message."""
_SCALARS_PER_ITEM = 16
"""JSON scalars that count as one item, in a container that has nothing else; see `Encoder._encode_all`."""

_SCALAR_TYPES = (bool, float, str)
_SAME_IN_JSON = {*_SCALAR_TYPES, type(None)}
"""Types whose values are the same in JSON. So are those of int, below `_SMALL_INT`."""
_SMALL_INT = 1 << 62
_LENGTH_BYTES = 4
_READ_BYTES = 1 << 16
MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Exceptions while receiving or decoding data that is not in this module's format."""

_to_json = json.JSONEncoder(separators=(",", ":")).encode


def send(descriptor: int, message: Any) -> None:
    """Write one frame. Raise OverflowError if it is longer than MAX_FRAME_BYTES."""
    body = _to_json(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise OverflowError(f"a message of {len(body)} bytes; expected at most {MAX_FRAME_BYTES}")
    unsent = memoryview(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    while unsent:
        num_written = os.write(descriptor, unsent)
        unsent = unsent[num_written:]


def receive(descriptor: int) -> Any:
    """Read one frame. Raise EOFError if the other end is closed, and one of MALFORMED if the frame is not valid."""
    length = int.from_bytes(_read(descriptor, _LENGTH_BYTES), "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(_read(descriptor, length))


def _read(descriptor: int, size: int) -> bytes:
    """Read exactly `size` bytes."""
    parts = []
    while size:
        part = os.read(descriptor, min(size, _READ_BYTES))
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
        self._number_of_id = {id(node): number for number, node in enumerate(self.nodes)}
        self._num_items = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Return the value as JSON. A container that is too deep or too large becomes a handle."""
        kind = type(value)

        # Scalars. A subclass may have its own methods, so the builtin class converts it.
        if value is None or kind in _SCALAR_TYPES:
            return value
        if issubclass(kind, int):
            number = int.__index__(value)
            return number if -_SMALL_INT < number < _SMALL_INT else ["int", hex(number)]
        if issubclass(kind, float):
            return float.__float__(value)
        if issubclass(kind, str):
            return str.__str__(value)

        # Values that are not containers.
        if id(value) in self._number_of_id:
            return ["again", self._number_of_id[id(value)]]
        if isinstance(value, type) and _TYPES.get(value.__name__) is value:
            return ["type", value.__name__]
        rebuilt = _REBUILT.get(kind.__qualname__)
        if rebuilt is not None and kind.__module__ == rebuilt.module:
            return [kind.__qualname__, *map(self.encode, rebuilt.arguments(value))]

        # Containers, and everything else.
        base = _base(kind)
        if base is None or depth >= MAX_DEPTH or self._num_items > MAX_ITEMS:
            return self._handle(value)
        if base.__name__ in _MUTABLE:
            self._number_of_id[id(value)] = len(self.nodes)
            self.nodes.append(value)
        return [base.__name__, self.contents(value, depth)]

    def contents(self, value: Any, depth: int = 0) -> Any:
        """Return only the encoded contents of a container."""
        # Methods of the builtin class, because a subclass may have its own.
        if isinstance(value, dict):
            keys = self._encode_all(list(dict.keys(value)), depth)
            values = self._encode_all(list(dict.values(value)), depth)
            return [keys, values]
        base: Any = _base(type(value))
        return self._encode_all(list(base.__iter__(value)), depth)

    def _encode_all(self, items: list[Any], depth: int) -> list[Any]:
        """Return the encoded items of a container. This is fast for long lists of JSON scalars."""
        kinds = set(map(type, items))
        same_in_json = kinds <= _SAME_IN_JSON
        if not same_in_json and kinds <= {int, bool}:
            same_in_json = min(items) > -_SMALL_INT and max(items) < _SMALL_INT
        if same_in_json:
            self._num_items += len(items) // _SCALARS_PER_ITEM
            return items
        self._num_items += len(items)
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
        if tag in _MUTABLE:
            # The node gets its number before its items get theirs, as in `Encoder.encode`.
            node = _MUTABLE[tag]()
            self.nodes.append(node)
            return self.fill(node, rest[0])
        if tag in _FROM_ITEMS:
            return _FROM_ITEMS[tag](self._decode_all(rest[0]))
        if tag in _REBUILT:
            return self._rebuild(tag, rest)
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

    def fill(self, node: Any, data: Any) -> Any:
        """Replace the contents of a container with those encoded in `data`, and return it."""
        # Decode the items before clearing the node, because a node may contain itself.
        items: Any
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

    def _rebuild(self, name: str, encoded_arguments: list[Any]) -> Any:
        arguments = [self.decode(argument) for argument in encoded_arguments]
        if not set(map(type, arguments)) <= {int, *_SAME_IN_JSON}:  # a constructor might call a handle
            raise ValueError(f"the arguments of {name}")
        # A program that uses none of these modules does not import them.
        kind = getattr(import_module(_REBUILT[name].module), name)
        constructor = getattr(kind, "fromisoformat", kind)
        return constructor(*arguments)

    def _decode_all(self, data: Any) -> Any:
        """Return the decoded items of a container. JSON scalars are returned unchanged."""
        kinds = set(map(type, data))
        if list in kinds or dict in kinds:
            return [self.decode(item) for item in data]
        return data


PREDICATES = {name for kind in (str, bytes, set, int, float) for name in dir(kind) if name.startswith("is")}
PREDICATES |= {"startswith", "endswith"}
"""Methods that a result has only if it is plain data. They compare it with their arguments, or return a truth value.
Methods of other results run in the candidate's process, so `result.startswith("six")` would send the expected value
there."""


def _base(kind: type) -> type | None:
    """Return the container type that the type is or extends, or None."""
    if kind in _CONTAINERS:
        return kind
    for base in _CONTAINERS:
        if issubclass(kind, base):
            return base
    return None


_MUTABLE: dict[str, Any] = {kind.__name__: kind for kind in (list, Counter, OrderedDict, dict, set, deque, bytearray)}
"""Containers that are made empty and then filled. A subclass comes before its base class."""
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "frozenset": frozenset,
    "bytes": bytes,
    "iterator": iter,
    "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: dict(items).items(),
}
"""Containers that are made of their items."""
_DICTIONARY_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: dict[type, None] = dict.fromkeys([*_MUTABLE.values(), tuple, frozenset, bytes, *_DICTIONARY_VIEWS])
"""All container types, as an ordered set."""

_TYPES: dict[str, type] = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and kind.__module__ == "builtins"
}


class _Rebuilt(NamedTuple):
    """How a value that is neither a scalar nor a container is sent: by what it is made of."""

    module: str
    """The module of its type."""
    arguments: Callable[[Any], tuple[Any, ...]]
    """Returns the arguments of its type, or of its type's `fromisoformat`."""


_BOUNDS = _Rebuilt("builtins", lambda value: (value.start, value.stop, value.step))
_ISO_FORMAT = _Rebuilt("datetime", lambda value: (value.isoformat(),))
_REBUILT = {
    "range": _BOUNDS,
    "slice": _BOUNDS,
    "complex": _Rebuilt("builtins", lambda value: (value.real, value.imag)),
    "Decimal": _Rebuilt("decimal", lambda value: (str(value),)),
    "Fraction": _Rebuilt("fractions", lambda value: (value.numerator, value.denominator)),
    "timedelta": _Rebuilt("datetime", lambda value: (value.days, value.seconds, value.microseconds)),
    "date": _ISO_FORMAT,
    "datetime": _ISO_FORMAT,
    "time": _ISO_FORMAT,
}
"""Types by the names that are sent."""
