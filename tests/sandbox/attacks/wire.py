"""Programs that write to the socket of the tests. `frame` encodes a message; see `codec.py`."""

HEADER = """
import json
def frame(message):
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "little") + body
"""

ATTACKS = {
    "blamed_tests": r"""
# Answers so that the tests' own process fails in ways that look like a broken data set.
import os
os.write(3, frame(["raised", [], ["ImportError"], "No module named 'tests'"]))
def total(numbers): raise ImportError("No module named 'numpy'")
""",
    "control_characters": r"""
# Puts escape sequences, line breaks and lone surrogates into the message of the verdict, for terminals and logs.
def total(numbers): raise ValueError("\x1b]0;passed\x07\x1b[2J\x1b[1A\rpassed\n\ud800\u202e\x00\x9b")
""",
    "early_replies": r"""
# Sends, before it is asked, answers to calls that have not come, in the true wire format: every one the number 6.
# status: failed, crashed, timeout
import os
os.write(3, frame(["ready"]) + frame(["returned", [], 6]) * 1000)
""",
    "false_coroutines": r"""
# Says that objects are coroutines or asynchronous generators, or both, that are neither, or do not exist.
# status: failed, crashed, timeout
# test: import asyncio
# test: async def everything():
# test:     results = await asyncio.gather(*[total([number]) for number in range(6)], return_exceptions=True)
# test:     return results, [item async for item in total([6])]
# test: assert asyncio.run(everything()) == ([6] * 6, [6])
import os
kinds = [["await"], ["anext"], ["await", "anext", "call"], "await", [["await"]], 7]
class Thing: pass
def total(numbers):
    number = numbers[0]
    os.write(3, frame(["returned", [], ["handle", number * 1000, kinds[number % 6]]]))
    return Thing()
""",
    "invalid_alone": r"""
# Sends the message for an invalid program with nothing in it, to trip the reader before any test has asked anything.
# status: failed, invalid, crashed
import os
os.write(3, (11).to_bytes(4, "little") + b'["invalid"]')
""",
    "nested_text": r"""
# Sends exception texts that are lists, nested as deep as JSON is read, to trip whoever prints them.
import os
for depth in (900, 950, 970, 980, 985, 990):
    body = b'["raised", [], ["ValueError"], ' + b"[" * depth + b"]" * depth + b"]"
    os.write(3, len(body).to_bytes(4, "little") + body)
""",
    "random_frames": r"""
# Answers with random frames in the true grammar, or nearly: every tag, every kind of exception, at every place.
# status: failed, crashed, timeout, memory, invalid, blocked
import json, os, random
rng = random.Random(int("@SEED@"))
tags = ["list", "dict", "set", "tuple", "frozenset", "deque", "Counter", "OrderedDict", "bytearray", "bytes", "range"]
tags += ["complex", "Decimal", "Fraction", "int", "again", "handle", "iterator", "defaultdict", "x", None, 3, [], {}]
plain = [None, True, False, 0, -1, 2**70, 1.5, float("nan"), float("inf"), "", "0x", "ff", "1e999", "sNaN", "\ud800"]
plain += [[], [[]], {}, {"a": 1}]
kinds = ["ValueError", "StopIteration", "ImportError", "SystemExit", "OSError", "UnicodeDecodeError"]
kinds += ["SyntaxError", "ExceptionGroup", "MemoryError", "RecursionError", "AssertionError", "KeyError", "Warning"]
kinds += ["object", "len", "BaseException", "PermissionError", 3]
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
        args = rng.choice([["tuple", [value(), value()]], value()])
        return ["raised", changes, names, rng.choice(["text", value()]), args]
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
""",
    "text_of_failure": r"""
# Returns objects whose text cannot be had, where the tests put them into the message of their assertion.
# test: result = total([1, 2, 3])
# test: assert result == 6, result
class Thing:
    def __repr__(self): raise KeyboardInterrupt
    __str__ = __repr__
def total(numbers): return Thing()
""",
    "text_of_key": r"""
# Returns an object as a key that is not found: the text of KeyError asks for its repr, which is no text.
# test: assert {6: True}[total([1, 2, 3])]
import os
class Thing:
    def __repr__(self):
        os._exit(0)
def total(numbers): return Thing()
""",
    "too_deep_to_return": r"""
# Answers with a list so deep, in the true wire format, that the tests cannot pass it back: is it their fault then?
# functions: total, wrap
# test: assert total(wrap([1, 2, 3])) == 6
import json, os
def wrap(numbers):
    nested = ["list", []]
    for _ in range(150):
        nested = ["list", [nested]]
    body = json.dumps(["returned", [], nested]).encode()
    os.write(3, len(body).to_bytes(4, "little") + body)
    return -1
""",
    "too_large_to_return": r"""
# Answers with a text that takes two bytes a letter on its way in and six on its way back, more than a message may have.
# status: failed, crashed, memory, timeout
# functions: total, wrap
# test: assert total(wrap([1, 2, 3])) == 6
import os
def wrap(numbers):
    body = '["returned",[],"'.encode() + "é".encode() * 12_000_000 + b'"]'
    frame = memoryview(len(body).to_bytes(4, "little") + body)
    while frame:
        frame = frame[os.write(3, frame) :]
    return -1
""",
}
