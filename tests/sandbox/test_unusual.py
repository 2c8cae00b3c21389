"""Unusual correct programs get the verdict of the official harness. The intended differences are listed, too.

Each case is a program and, after the dashes, the tests of its function `f`.
"""

from dataclasses import replace

import pytest
from helpers.small_programs import passed_officially, split, verdicts

from lora_grpo import sandbox
from lora_grpo.sandbox import Settings

SECONDS = 30.0  # the large ones take seconds on a busy machine

CASES = {
    "infinite generator": """
def f():
    n = 0
    while True:
        yield n
        n += 1
---
import itertools
assert list(itertools.islice(f(), 3)) == [0, 1, 2]
steps = f()
assert next(steps) == 0 and next(steps) == 1
""",
    "generator with send and return": """
def f():
    got = yield 1
    while got is not None: got = yield got * 2
    return 7
---
g = f()
assert next(g) == 1 and g.send(4) == 8 and g.send(5) == 10
try:
    next(g)
    assert False
except StopIteration as end:
    assert end.value == 7
""",
    "iterator object": """
class Countdown:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if self.n == 0: raise StopIteration
        self.n -= 1
        return self.n
def f(n): return Countdown(n)
---
from collections.abc import Iterator, Sized
assert list(f(3)) == [2, 1, 0] and isinstance(f(1), Iterator) and not isinstance(f(1), Sized) and not callable(f(1))
""",
    "Counter": """
from collections import Counter
def f(s): return Counter(s)
---
assert f("aab") == {"a": 2, "b": 1} and f("aab")["z"] == 0 and f("aab").most_common(1) == [("a", 2)]
""",
    "dictionary views": """
def f(d, kind): return getattr(d, kind)()
---
d = {"a": 1, "b": 2}
assert f(d, "keys") == {"a", "b"} and list(f(d, "values")) == [1, 2] and f(d, "items") == d.items()
assert sorted(f(d, "keys")) == ["a", "b"] and len(f(d, "values")) == 2 and ("a", 1) in f(d, "items")
""",
    "Decimal": """
from decimal import Decimal
def f(a, b): return Decimal(a) + Decimal(b)
---
from decimal import Decimal
assert f("0.1", "0.2") == Decimal("0.3") and str(f("1.10", "1")) == "2.10" and isinstance(f("1", "1"), Decimal)
""",
    "subclass of str": """
class Name(str): pass
def f(s): return Name(s.title())
---
assert f("ab cd") == "Ab Cd" and f("x").lower() == "x" and {f("x"): 1} == {"X": 1} and f("ab").startswith("A")
""",
    "enumerations": """
import enum
class Color(enum.Enum):
    RED = 1
class Level(enum.IntEnum):
    HIGH = 3
def f(kind): return Color.RED if kind == "color" else Level.HIGH
---
assert f("color").name == "RED" and f("color").value == 1 and f("level") == 3 and f("level") > 2
""",
    "functions as results": """
import operator
def f(kind, n=0):
    def add(x): return x + n
    def every(*xs, **more): return xs, more
    return {"closure": add, "every": every, "builtin": len, "op": operator.itemgetter(n)}[kind]
---
assert f("closure", 3)(4) == 7 and callable(f("closure")) and f("every")(1, a=2) == ((1,), {"a": 2})
assert f("builtin")([1, 2]) == 2 and f("op", 1)([5, 6]) == 6 and list(map(f("closure", 1), [1, 2])) == [2, 3]
""",
    "decorated": """
import functools
def twice(g):
    @functools.wraps(g)
    def inner(*args, **kwargs): return g(*args, **kwargs) * 2
    return inner
@twice
def f(x, *, y=1): return x + y
---
assert f(1) == 4 and f(1, y=2) == 6 and f.__name__ == "f"
""",
    "data class": """
from dataclasses import dataclass, field
@dataclass
class Item:
    name: str
    tags: list = field(default_factory=list)
def f(name): return Item(name, ["new"])
---
item = f("a")
assert item.name == "a" and item.tags == ["new"] and repr(item) == "Item(name='a', tags=['new'])"
item.name = "b"
assert item.name == "b"
""",
    "properties and class methods": """
class Square:
    def __init__(self, side): self.side = side
    @property
    def area(self): return self.side ** 2
    @classmethod
    def unit(cls): return cls(1)
    def __len__(self): return 4
    def __getitem__(self, key): return [self.side] * 4
    def __bool__(self): return self.side > 0
    def __str__(self): return f"square {self.side}"
def f(side): return Square(side) if side else Square.unit()
---
s = f(3)
assert s.area == 9 and f(0).area == 1 and len(s) == 4 and s[0] == [3] * 4 and s and not f(-1) and str(s) == "square 3"
""",
    "regular expressions": """
import re
def f(pattern, text): return re.match(pattern, text)
---
m = f(r"(\\w)(?P<n>\\d+)", "a12")
assert m and m.group(1) == "a" and m.groupdict() == {"n": "12"} and m.span() == (0, 3) and f("x", "y") is None
assert not f("x", "y")
""",
    "global state": """
calls = []
total = 0
def f(x):
    global total
    total += x
    calls.append(x)
    return total, calls
---
assert f(1) == (1, [1]) and f(2) == (3, [1, 2])
""",
    "arguments changed in place": """
def f(xs, d, s):
    xs.sort()
    xs[0] = "first"
    d.setdefault("a", []).append(1)
    s.discard(2)
---
xs, d, s = [3, 1, 2], {}, {1, 2}
assert f(xs, d, s) is None and xs == ["first", 2, 3] and d == {"a": [1]} and s == {1}
""",
    "swap of shared rows": """
def f(grid):
    grid[0][0] = 9
    return grid
---
row = [1]
grid = [row, row]
assert f(grid) is grid and row == [9] and grid[1] is row
""",
    "bytes and bytearray": """
def f(data):
    data.reverse()
    return bytes(data), data
---
data = bytearray(b"ab")
assert f(data) == (b"ba", bytearray(b"ba")) and data == b"ba"
""",
    "dates": """
from datetime import date, datetime, time, timedelta, timezone
def f(kind):
    return {"date": date(2024, 2, 28) + timedelta(2), "time": time(1, 2, 3), "delta": timedelta(hours=25),
            "datetime": datetime(2024, 1, 1, tzinfo=timezone.utc)}[kind]
---
from datetime import date, datetime, time, timedelta, timezone
assert f("date") == date(2024, 3, 1) and f("time") == time(1, 2, 3) and f("delta") == timedelta(1, 3600)
assert f("datetime") == datetime(2024, 1, 1, tzinfo=timezone.utc) and f("date").isoformat() == "2024-03-01"
""",
    "exceptions with numbers": """
import os
def f(kind):
    if kind == "os": raise OSError(2, "missing")
    if kind == "key": raise KeyError("a")
    if kind == "exit": raise NotImplementedError("later")
    if kind == "decode": b"\\xff".decode()
    return {}[kind]
---
for kind, expected, text in [("os", FileNotFoundError, "[Errno 2] missing"), ("key", KeyError, "'a'"),
                             ("exit", NotImplementedError, "later"), (3, LookupError, "3"),
                             ("decode", ValueError, None)]:
    try:
        f(kind)
    except expected as error:
        assert text is None or str(error) == text, str(error)
    else:
        assert False
""",
    "a million items as argument": """
def f(xs): return sum(xs), len(xs)
---
assert f(list(range(1_000_000))) == (499999500000, 1_000_000)
""",
    "a million items as result": """
def f(n): return list(range(n))
---
assert f(1_000_000) == list(range(1_000_000))
""",
    "deep nesting": """
def f(n):
    nested = []
    for _ in range(n): nested = [nested]
    return nested
---
assert f(2) == [[[]]] and str(f(90)) == "[" * 91 + "]" * 91
""",
    "slices of an object": """
class Line:
    def __getitem__(self, key): return [1, 2, 3][key]
    def __setitem__(self, key, value): self.set = (key.start, key.stop, key.step, value)
def f(): return Line()
---
line = f()
assert line[0:2] == [1, 2] and line[::-1] == [3, 2, 1] and line[-1] == 3
line[1:] = [5]
assert line.set == (1, None, None, [5])
""",
    "coroutines that the tests await": """
import asyncio
class Counter:
    def __init__(self): self.count = 0
    async def add(self, n):
        await asyncio.sleep(0.001)
        self.count += n
        return self
async def f(kind, *more):
    if kind == "add": return (await more[0].add(2)).count
    if kind == "list": return [1, 2]
    if kind == "raise": raise KeyError("a")
    if kind == "all": return await asyncio.gather(*more)
    return Counter()
---
import asyncio
async def main():
    counter = await f("counter")
    assert (await counter.add(1)).count == 1 and await f("add", counter) == 3
    assert await asyncio.gather(f("list"), f("list")) == [[1, 2], [1, 2]]
    assert await f("all", f("list"), f("add", counter)) == [[1, 2], 5]
    task = asyncio.create_task(f("list"))
    assert await asyncio.wait_for(task, 5) == [1, 2]
    try:
        await f("raise")
    except KeyError as error:
        return error.args
assert asyncio.iscoroutine(f("list")) and asyncio.run(main()) == ("a",)
""",
    "asynchronous generators": """
import asyncio
async def f(n):
    for i in range(n):
        await asyncio.sleep(0)
        yield [i]
---
import asyncio
async def main():
    steps = f(3)
    first = await anext(steps)
    return first, [item async for item in steps], [item async for item in f(0)]
assert asyncio.run(main()) == ([0], [[1], [2]], [])
""",
}

DIFFERENT = {
    "functions of the tests as arguments": """
def f(g, x): return g(x)
---
assert f(lambda x: x + 1, 1) == 2
""",
    "equality of the program's objects": """
from dataclasses import dataclass
@dataclass
class P:
    x: int
def f(x): return P(x)
---
assert f(1) == f(1)
""",
    "identity of the program's objects": """
import enum
class C(enum.Enum):
    RED = 1
def f(): return C.RED
---
assert f() is f()
""",
    "operators on the program's objects": """
class V:
    def __init__(self, x): self.x = x
    def __add__(self, other): return V(self.x + other.x)
    def __float__(self): return 1.5
def f(x): return V(x)
---
assert (f(1) + f(2)).x == 3 and float(f(1)) == 1.5
""",
    "order of the program's objects": """
import functools
@functools.total_ordering
class V:
    def __init__(self, x): self.x = x
    def __lt__(self, other): return self.x < other.x
def f(x): return V(x)
---
assert sorted([f(2), f(1)])[0].x == 1
""",
    "classes of the program": """
class Node: pass
def f(kind): return Node if kind else Node()
---
assert isinstance(f(0), f(1))
""",
    "context managers": """
import contextlib
@contextlib.contextmanager
def f(): yield 1
---
with f() as one:
    assert one == 1
""",
    "paths": "import pathlib\ndef f(): return pathlib.Path('a')\n---\nimport pathlib\nassert f() == pathlib.Path('a')",
    "UUID": "import uuid\ndef f(): return uuid.UUID(int=1)\n---\nimport uuid\nassert f() == uuid.UUID(int=1)",
    "UserList": "import collections\ndef f(): return collections.UserList([1])\n---\nassert f() == [1]",
    "UserDict": "import collections\ndef f(): return collections.UserDict(a=1)\n---\nassert f() == {'a': 1}",
    "UserString": "import collections\ndef f(): return collections.UserString('a')\n---\nassert f() == 'a'",
    "ChainMap": "import collections\ndef f(): return collections.ChainMap({'a': 1})\n---\nassert f() == {'a': 1}",
    "memoryview": "def f(): return memoryview(b'a')\n---\nassert f() == b'a'",
    "array": "import array\ndef f(): return array.array('i', [1])\n---\n"
    "import array\nassert f() == array.array('i', [1])",
    "time zones": "import datetime\ndef f(): return datetime.timezone.utc\n---\n"
    "import datetime\nassert f() == datetime.timezone.utc",
    "exceptions as values": "def f(): return ValueError(1)\n---\nassert isinstance(f(), ValueError)",
    "default of a defaultdict": "import collections\ndef f(): return collections.defaultdict(int)\n---\n"
    "assert f()['a'] == 0",
    "fields of a named tuple": "import collections\ndef f(): return collections.namedtuple('P', 'x')(1)\n---\n"
    "assert f().x == 1",
    "class of a result": "class L(list): pass\ndef f(): return L()\n---\nassert type(f()).__name__ == 'L'",
    "a result that changes later": "log = []\ndef f():\n log.append(1)\n return log\n---\n"
    "a = f()\nf()\nassert a == [1, 1]",
    "StopIteration": "def f(): raise StopIteration\n---\nassert list(map(lambda _: f(), [1])) == []",
    "SystemExit": "def f(): raise SystemExit\n---\ntry:\n f()\nexcept SystemExit:\n seen = True\nassert seen",
    "attributes of exceptions": "def f():\n e = ValueError()\n e.a = 1\n raise e\n---\n"
    "try:\n f()\nexcept ValueError as e:\n assert e.a == 1",
    "identity of NaN": "def f(x): return [x]\n---\nx = float('nan')\nassert f(x) == [x]",
    "iterators as arguments": "def f(xs): return next(xs)\n---\nxs = iter([1, 2])\nassert (f(xs), next(xs)) == (1, 2)",
    "nesting of 200 levels": "def f():\n x = []\n for _ in range(200): x = [x]\n return x\n---\n"
    "x = []\nfor _ in range(200): x = [x]\nassert f() == x",
    "asynchronous context managers": "class C:\n async def __aenter__(self): return 1\n"
    " async def __aexit__(self, *_): pass\ndef f(): return C()\n---\n"
    "import asyncio\nasync def main():\n async with f() as one: return one\nassert asyncio.run(main()) == 1",
    "kinds of functions": "async def f(): pass\n---\nimport inspect\nassert inspect.iscoroutinefunction(f)",
    "event loops of the tests": "import asyncio\nasync def f(e): await e.wait()\n---\nimport asyncio\n"
    "async def main():\n e = asyncio.Event()\n e.set()\n await f(e)\n return 1\nassert asyncio.run(main()) == 1",
    "tasks at the same time": "import asyncio\nlog = []\nasync def f(x):\n log.append(x)\n await asyncio.sleep(0)\n"
    " log.append(x)\n return list(log)\n---\nimport asyncio\n"
    "async def main(): return await asyncio.gather(f(1), f(2))\nassert asyncio.run(main())[1] == [1, 2, 1, 2]",
}


@pytest.fixture(scope="module", autouse=True)
def isolated():
    sandbox.start(Settings(timeout_seconds=SECONDS))
    yield
    sandbox.stop()


def test_unusual_correct_programs_pass_here_and_there():
    passed = passed_officially(CASES, SECONDS)
    assert [name for name in CASES if not passed[name]] == []
    results = verdicts([program for _, program in split(CASES)])
    assert {name: verdict for name, verdict in results.items() if not verdict.passed} == {}


def test_their_tests_are_real():
    wrong = "def f(*_, **__): return None"
    results = verdicts([replace(program, source=wrong) for _, program in split(CASES)])
    assert [name for name, verdict in results.items() if verdict.passed] == []


def test_the_intended_differences_are_all_there_are():
    passed = passed_officially(DIFFERENT, SECONDS)
    assert [name for name in DIFFERENT if not passed[name]] == []
    results = verdicts([program for _, program in split(DIFFERENT)])
    assert [name for name, verdict in results.items() if verdict.passed] == []
