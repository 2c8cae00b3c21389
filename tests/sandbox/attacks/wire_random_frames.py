"""Answers with random frames in the true grammar, or nearly: every tag, every kind of exception, at every place."""
# status: failed, crashed, timeout, memory, invalid, blocked

import json
import os
import random

rng = random.Random(int("@SEED@"))
tags = ["list", "dict", "set", "tuple", "frozenset", "deque", "Counter", "OrderedDict", "bytearray", "bytes", "range"]
tags += ["complex", "Decimal", "Fraction", "int", "again", "handle", "iterator", "defaultdict", "x", None, 3, [], {}]
plain = [
    None,
    True,
    False,
    0,
    -1,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "0x",
    "ff",
    "1e999",
    "sNaN",
    "\ud800",
    [],
    [[]],
    {},
    {"a": 1},
]
kinds = ["ValueError", "StopIteration", "ImportError", "SystemExit", "OSError", "UnicodeDecodeError", "SyntaxError", "ExceptionGroup"]
kinds += ["MemoryError", "RecursionError", "AssertionError", "KeyError", "Warning", "object", "len", "BaseException", "PermissionError", 3]


def value(depth=0):
    chance = rng.random()
    if depth > 4 or chance < 0.3:
        return rng.choice(plain)
    parts = [value(depth + 1) for _ in range(rng.randrange(4))]
    return [rng.choice(tags), *parts] if chance < 0.7 else [rng.choice(tags), parts] if chance < 0.95 else parts


def message():
    chance = rng.random()
    changes = rng.choice([[], [], [[0, []]], [[0, value()]], [[rng.choice(plain), value()]], value()])
    if chance < 0.45:
        return ["returned", changes, value()]
    if chance < 0.75:
        names = [rng.choice(kinds) for _ in range(rng.randrange(4))]
        return ["raised", changes, names, rng.choice(["text", value()]), rng.choice([["tuple", [value(), value()]], value()])]
    return rng.choice([["ready"], ["invalid", value()], ["returned"], ["raised", value()], value()])


def frame(content):
    body = json.dumps(content).encode()
    if rng.random() < 0.02:
        body = bytes(rng.randrange(256) for _ in range(rng.randrange(30)))
    length = len(body) if rng.random() > 0.02 else rng.choice([0, 1, 2**32 - 1, len(body) + 1])
    return length.to_bytes(4, "little") + body


if rng.random() < 0.2:
    os.write(3, frame(message()))


def total(*_, **__):
    for _ in range(3):
        os.write(3, frame(message()))
    return -1
