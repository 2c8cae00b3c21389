"""Whatever a candidate does or sends, it gets a verdict. Only the dataset's own program shows that tests are broken."""

import pytest

from lora_grpo import sandbox
from lora_grpo.sandbox import Program, Settings

TEST = "assert f(2) == 6.125\nassert f(3) == 6.125"


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
    statuses = {name: verdict.status for name, verdict in zip(PROGRAMS, verdicts, strict=True)}
    assert statuses == dict.fromkeys(PROGRAMS, "failed")
