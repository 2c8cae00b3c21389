import pytest

from lora_grpo import sandbox
from lora_grpo.grading.programs import check_many

ROW = {"id": "t/0", "entry_point": "f", "test": "assert f(1) == 2\nassert f(2) == 4\n", "prelude": "", "answer": ""}


def fenced(code):
    return f"```python\n{code}\n```"


RIGHT = fenced("def f(x):\n    return 2 * x")
WRONG = fenced("def f(x):\n    return 2")


@pytest.fixture
def ran(monkeypatch):
    """Replace the sandbox: a program that contains `2 * x` passes. The list has the programs of each call."""
    calls = []

    def run(programs):
        calls.append(list(programs))
        verdicts = (
            ("passed", "") if "2 * x" in program.source else ("failed", "assert f(2) == 4") for program in programs
        )
        return [sandbox.Verdict(status, message) for status, message in verdicts]

    monkeypatch.setattr(sandbox, "run", run)
    return calls


def test_a_batch_is_one_call_and_what_has_no_code_is_not_run(ran):
    verdicts = check_many([WRONG, "I cannot.", RIGHT], [ROW] * 3)
    assert [(verdict.passed, verdict.reason, verdict.detail) for verdict in verdicts] == [
        (False, "failed", "assert f(2) == 4"),
        (False, "no_code", None),
        (True, "passed", None),
    ]
    assert [verdict.extracted for verdict in verdicts] == [
        "def f(x):\n    return 2\n",
        None,
        "def f(x):\n    return 2 * x\n",
    ]
    assert [len(call) for call in ran] == [2]


def test_what_occurs_twice_runs_once(ran):
    assert [verdict.passed for verdict in check_many([RIGHT, WRONG, RIGHT, RIGHT], [ROW] * 4)] == [
        True,
        False,
        True,
        True,
    ]
    check_many([RIGHT, RIGHT], [ROW, {**ROW, "test": "assert f(1) == 3"}])
    assert [len(call) for call in ran] == [2, 2]


def test_the_program_says_what_the_sandbox_needs(ran):
    prefix = 'import math\n\ndef f(x):\n    """Double."""\n'
    check_many(["    return 2 * x"], [{**ROW, "prelude": prefix, "completion_prefix": prefix}])
    ((program,),) = ran
    assert program == sandbox.Program(f"{prefix}    return 2 * x\n", ROW["test"], ("f",), prefix, name="t/0")
