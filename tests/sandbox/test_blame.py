"""Whatever a candidate does or sends, it gets a verdict. Only the dataset's own program shows that tests are broken."""

import builtins
import json
import random
import socket

import pytest

from lora_grpo import sandbox
from lora_grpo.sandbox import Program, Settings, exam
from lora_grpo.sandbox.examiner import examine

TEST = "assert f(2) == 6.125\nassert f(3) == 6.125"
STATUSES = {"failed", "invalid", "crashed", "memory", "blocked"}


@pytest.fixture(scope="module", autouse=True)
def pool():
    sandbox.start(Settings(timeout_seconds=2.0, workers=2))
    yield
    sandbox.stop()


# Programs whose exceptions the constructors or texts of the builtin classes do not accept.
FRAME = "import json, os\ndef send(m):\n b = json.dumps(m).encode()\n os.write(3, len(b).to_bytes(4, 'little') + b)\n"
PROGRAMS = {
    "decode error": "e = UnicodeDecodeError('a', b'b', 0, 1, 'r')\ne.args = ('a', b'b', 2**70, 1, 'r')\nraise e",
    "encode error": "e = UnicodeEncodeError('a', 'b', 0, 1, 'r')\ne.args = ('a', 'b', 2**70, 1, 'r')\nraise e",
    "translate error": "e = UnicodeTranslateError('b', 0, 1, 'r')\ne.args = ('b', 0, 2**70, 'r')\nraise e",
    "negative start": "e = UnicodeDecodeError('a', b'b', 0, 1, 'r')\n"
    "e.args = ('a', b'b', -2**40, -2**40 + 1, 'r')\ndef f(x): raise e",
    "syntax error": "e = SyntaxError('x')\ne.args = ('x', range(2**70))\nraise e",
    "blocking": "e = BlockingIOError('x')\ne.args = (1, 'x', 2**70)\nraise e",
    "os error": "e = OSError('x')\ne.args = (object(), object())\nraise e",
    "group": FRAME + "send(['raised', [], ['ExceptionGroup', 'Exception'], 'x', ['tuple', ['m', ['handle', 0]]]])",
    "group alone": FRAME + "send(['raised', [], ['ExceptionGroup'], 'x', ['tuple', []]])",
    "group of all": FRAME + "send(['raised', [], ['BaseExceptionGroup', 'ValueError'], 'x', ['list', []]])",
    "loader": FRAME + "send(['ready'])\ndef f(x):\n send(['returned', [], ['type', '__loader__']])",
    "loader as exception": FRAME + "send(['raised', [], ['ValueError'], 'x', ['type', '__loader__']])",
    "warning": "class W(DeprecationWarning): pass\nraise W(*range(100))",
    "import": "import numpy",
    "assertion": "assert False, 'no tests'",
    "name": "raise NameError(\"name 'check' is not defined\")",
    "own class": "class E(Exception):\n def __init__(self): raise self\n args = property(lambda self: 1 / 0)\nraise E",
}


@pytest.mark.parametrize("test", [TEST, "name = f.__name__\nassert f(2) == 6.125"])
def test_a_program_with_an_unusual_exception_fails(test):
    programs = [Program(source, test, ("f",), name=name) for name, source in PROGRAMS.items()]
    verdicts = sandbox.run(programs)
    assert {name: verdict.status for name, verdict in zip(PROGRAMS, verdicts, strict=True)} == dict.fromkeys(
        PROGRAMS, "failed"
    )


NAMES = [
    *sorted(name for name, kind in vars(builtins).items() if isinstance(kind, type)),
    "__loader__",
    "len",
    "no such name",
    "",
    None,
    3,
]
SCALARS = [
    None, True, 0, 1, -1, 2**31, -(2**63), 2**70, 1.5, float("nan"), float("inf"), "", "a", "\ud800", "utf-8", 1e308,
]  # fmt: skip


def random_value(rng, depth=0):
    """Return a value in the format of the codec, or nearly."""
    chance = rng.random()
    if depth > 3 or chance < 0.5:
        return rng.choice(SCALARS)
    parts = [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    tag = rng.choice(["tuple", "list", "dict", "set", "handle", "iterator", "again", "type", "range", "bytes", "int"])
    if tag in ("type", "bytes", "int", "range", "handle", "again"):
        plain = {"type": [rng.choice(NAMES)], "bytes": ["62"], "int": [hex(2**70)], "range": [0, 2**70, 1]}
        return [tag, *plain.get(tag, [rng.randrange(3)])]
    return [tag, [[part, part] for part in parts] if tag == "dict" else parts]


def random_frames(rng):
    """Return frames of exceptions: sent before the first call, or as the answer to it."""
    kinds = [rng.choice(NAMES) for _ in range(rng.randrange(1, 4))]
    args = rng.choice([["tuple", [random_value(rng) for _ in range(rng.randrange(6))]], random_value(rng)])
    message = ["raised", [], kinds, "text", args]
    return [message] if rng.random() < 0.5 else [["ready"], message, message]


def test_ten_thousand_random_exceptions_are_never_the_tests_fault():
    rng = random.Random(0)
    tests = [
        TEST,
        "try:\n r = f(2)\nexcept Exception as e:\n r = str(e), repr(e), e.args\nassert r == 6.125",
        "for x in f(2):\n assert x == 6.125\nassert f(2) == 6.125",
    ]
    exams = [exam.prepare(Program("", test, ("f",))) for test in tests]
    statuses = dict.fromkeys(STATUSES, 0)
    for _ in range(10_000):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            frames = random_frames(rng)
            for message in frames:
                body = json.dumps(message).encode()
                theirs.sendall(len(body).to_bytes(4, "little") + body)
            theirs.shutdown(socket.SHUT_WR)
            report = examine(rng.choice(exams), ours.fileno())
        assert report["status"] in STATUSES, (frames, report)
        json.dumps(report)
        statuses[report["status"]] += 1
    assert statuses["failed"] > 5_000 and statuses["memory"] > 10 and statuses["blocked"] > 10
