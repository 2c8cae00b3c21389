"""HumanEval+ and MBPP+: rows of both published forms, EvalPlus's rules, and its verdicts."""

import json
import os
import random
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.mutants import mutants

from lora_grpo import sandbox
from lora_grpo.errors import UserError
from lora_grpo.grading import programs as program_grading
from lora_grpo.tasks import get_task
from lora_grpo.tasks.columns import reward_columns

PROMPT = 'def f(x):\n    """Halve a number."""\n'
HUMANEVAL = {
    "task_id": "HumanEval/7",
    "prompt": PROMPT,
    "entry_point": "f",
    "canonical_solution": "    return x / 2\n",
    "base_input": [[2]],
    "plus_input": [[3], [1e9]],
    "atol": 0,
    "contract": "",
}
MBPP = {
    "task_id": "Mbpp/602",
    "prompt": '"""\nWrite a function to halve a number.\nassert f(2) == "one"\n"""\n',
    "entry_point": "f",
    "canonical_solution": "\ndef f(x):\n    return x / 2\n",
    "base_input": [[2]],
    "plus_input": [[3]],
    "atol": 0,
}
HUB = {key: HUMANEVAL[key] for key in ("task_id", "prompt", "entry_point", "canonical_solution")}


ASSERTION_OF_HUB = """import numpy as np

def assertion(out, exp, atol):
    assert np.allclose(out, exp, rtol=1e-07, atol=atol)

"""


def loop_of_hub(function):
    """Return the part of a test program of the Hub that has the inputs, and a tolerance of 0.25."""
    return f"""inputs = [[2], [3], [inf]]
results = [1.0, 1.5, inf]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion({function}(*inp), exp, 0.25)
"""


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def load(task, path, *records, split="eval"):
    """Return the rows of a file with these records."""
    write_lines(path, records)
    return get_task(task).load(split, str(path))


def graded(row, *programs):
    """Return the status of each program."""
    return [verdict.status for verdict in program_grading.run_sources(programs, [row] * len(programs))]


def halving(result):
    """Return a program that is to halve a number, and returns this."""
    return f"def f(x):\n    return {result}\n"


@pytest.mark.parametrize(("task", "record"), [("humaneval-plus", HUMANEVAL), ("mbpp-plus", MBPP)])
def test_every_input_is_compared_with_the_reference(task, record, tmp_path):
    (row,) = load(task, tmp_path / "rows.jsonl", record)
    right, right_for_base_input, wrong = program_grading.run_sources(
        [halving("x * 0.5"), halving("1.0"), halving("x")], [row] * 3
    )
    assert (right.status, right.passed_tests, right.num_tests) == ("passed", 2, 2)
    assert (right_for_base_input.status, right_for_base_input.passed_tests) == ("failed", 1)
    assert (wrong.status, wrong.passed_tests) == ("failed", 0)
    assert get_task(task).check(get_task(task).gold(row), row).passed
    assert "1.5" not in row["question"] + row["test"] + row["prelude"]


@pytest.mark.parametrize(("task", "record"), [("humaneval-plus", HUMANEVAL), ("mbpp-plus", MBPP)])
def test_rewards_get_the_columns_of_the_release(task, record, tmp_path):
    written = {**record, "level": 3}
    (row,) = load(task, tmp_path / "rows.jsonl", written)
    columns = reward_columns(row)
    assert {name: columns[name] for name in written} == written
    assert (row["id"], row["answer"]) == (columns["id"], columns["answer"])


NEAR = halving("x / 2 + 0.2")
FAR = halving("x / 2 + 0.3")


def test_rows_of_humaneval_on_the_hub_have_the_inputs_and_tolerance_of_their_test_program(tmp_path):
    loop = textwrap.indent(loop_of_hub("candidate"), "    ")
    test = f"{ASSERTION_OF_HUB}def check(candidate):\n{loop}\ncheck(f)\n"
    (row,) = load("humaneval-plus", tmp_path / "rows.jsonl", {**HUB, "test": test})
    assert graded(row, row["answer"], NEAR, FAR) == ["passed", "passed", "failed"]


def test_rows_of_mbpp_on_the_hub_are_those_of_the_release(tmp_path):
    record = {
        "task_id": 602,
        "prompt": "Write a function to halve a number.",
        "code": MBPP["canonical_solution"],
        "test_list": ['assert f(2) == "one"', "assert f(3) == 1.5"],
        "test": ASSERTION_OF_HUB + loop_of_hub("f"),
    }
    (row,) = load("mbpp-plus", tmp_path / "hub.jsonl", record)
    assert graded(row, row["answer"], NEAR, FAR) == ["passed", "passed", "failed"]
    (released_row,) = load("mbpp-plus", tmp_path / "release.jsonl", MBPP)
    assert (row["id"], row["question"]) == (released_row["id"], released_row["question"])
    assert row["question"].endswith(
        'Write a function to halve a number. Your code should pass these tests:\n\nassert f(2) == "one"'
    )


@pytest.mark.parametrize(
    "change",
    [
        {"base_input": "[[2]]"},
        {"base_input": [2]},
        {"atol": "0"},
        {"plus_input": {"a": 1}},
        {"entry_point": ""},
        {"prompt": 1},
    ],
)
@pytest.mark.parametrize(("task", "record"), [("humaneval-plus", HUMANEVAL), ("mbpp-plus", MBPP)])
def test_a_malformed_row_is_named(task, record, change, tmp_path):
    with pytest.raises(UserError, match=r"rows\.jsonl:1"):
        load(task, tmp_path / "rows.jsonl", {**record, **change})


def test_a_row_of_the_hub_without_inputs_is_named(tmp_path):
    with pytest.raises(UserError, match=r"rows\.jsonl:1"):
        load("humaneval-plus", tmp_path / "rows.jsonl", {**HUB, "test": "pass"})


DIFFERENT = {"HumanEval/32"}
"""Tasks whose verdicts differ from EvalPlus's: docs/decisions/0031-verdicts-of-published-graders.md."""


class Rule(NamedTuple):
    """A program that EvalPlus compares with a reference."""

    function: str
    """Its name, by which EvalPlus knows some exceptions."""
    reference: str
    """The body of the reference, with the arguments x and y."""
    arguments: list[Any]
    tolerance: float
    body: str
    passes: bool


RULES = [
    Rule("f", "return [0.1, 0.2]", [], 0, "return [0.1, 0.2 + 1e-7]", True),
    Rule("f", "return [0.1, 0.2]", [], 0, "return [0.1, 0.2 + 1e-5]", False),
    Rule("f", "return [0.1, 0.2]", [], 0, "return (0.1, 0.2)", False),  # another type
    Rule("f", "return [0.1, 0.2]", [], 0, "return [0.1]", False),
    Rule("f", "return [[0.1]]", [], 0, "return [[0.1 + 1e-9]]", False),  # not a list of floats
    Rule("f", "return [[0.1]]", [], 0.01, "return [[0.1 + 1e-3]]", True),
    Rule("f", "return [[0.1], [0.1]]", [], 0.01, "return [[0.1], 0.1]", False),
    Rule("f", "return [[0.1, 0.1]]", [], 0.01, "return [[0.1], [0.1001]]", False),  # another shape
    Rule("f", "return ['a', 0.5]", [], 0.01, "return ['a', 0.5001]", False),  # no array of numbers
    Rule("f", "return 1", [], 0.5, "return 1.0", True),
    Rule("f", "return 1.0", [], 0.5, "return 1", True),
    Rule("f", "return 2.0", [], 0.5, "return 1", False),
    Rule("f", "return 10**30", [], 0.5, "return 10**30 + 1", True),
    Rule("f", "return 10**30", [], 0.5, "return 10**30 + 10**25", False),
    Rule("f", "return [10**30]", [], 0.5, "return [10**30 + 1]", False),  # no number of NumPy
    Rule("f", "return [2**63]", [], 0.5, "return [2**63 + 1]", True),
    Rule("f", "return True", [], 0.5, "return False", False),
    Rule("f", "return {'a': 0.5}", [], 0.5, "return {'a': 0.4}", False),
    Rule("f", "return [1, 2.0, 3j]", [], 0.5, "return [1.1, 2, 3.1j]", True),
    Rule("f", "return [[], []]", [], 0.5, "return [[], []]", True),
    Rule("f", "return ((1, 2.5), (3, 4))", [], 0.1, "return ([1, 2.45], [3, 4])", True),
    Rule("f", "return float('inf')", [], 0, "return 1e308", False),
    Rule("f", "return float('nan')", [], 0, "return float('nan')", False),
    Rule("f", "return None", [], 0, "return", True),
    Rule("f", "return None", [], 0, "raise ValueError", False),
    Rule("check_str", "import re; return re.match('a', x)", ["a"], 0, "return object()", True),
    Rule("check_str", "import re; return re.match('a', x)", ["b"], 0, "return object()", False),
    Rule("check_str", "import re; return re.match('a', x)", ["b"], 0, "return False", True),
    Rule("Diff", "return [x, 1]", [2], 0, "return (1, x, x)", True),
    Rule("Diff", "return [x, 1]", [2], 0, "return [x]", False),
    Rule("are_equivalent", "return True", [1], 0, "return None", True),
    Rule("sum_div", "return 5", [1], 0, "return 0", True),
    Rule("sum_div", "return 5", [1], 0, "return 4", False),
    Rule("surface_Area", "return 33", [3, 4], 0, "return 35", True),
    Rule("surface_Area", "return 33", [3, 4], 0, "return 34", False),
    Rule("digit_distance_nums", "return 0", [123, 256], 0, "return 7", True),
    Rule("digit_distance_nums", "return 0", [1, 23], 0, "return 4", True),
    Rule("digit_distance_nums", "return 0", [1, 23], 0, "return 5", False),
    Rule("find_zero", "return -0.5", [[1, 2]], 1e-4, "return -0.50001", True),
    Rule("find_zero", "return 9.0", [[-6, 11, -6, 1]], 1e-4, "return 3.0", True),
    Rule("find_zero", "return -0.5", [[1, 2]], 1e-4, "return -0.6", False),
    Rule("find_zero", "return -0.5", [[1, 2]], 1e-4, "x.clear(); return 7", False),
]


def records_and_programs():
    """Return the rows of the rules, in the form of a release, and the programs."""
    records = []
    programs = []
    for number, rule in enumerate(RULES, 900):
        parameters = ", ".join("xy"[: len(rule.arguments)])
        header = f"def {rule.function}({parameters}):\n    "
        record = {
            **MBPP,
            "task_id": f"Mbpp/{number}",
            "entry_point": rule.function,
            "canonical_solution": header + rule.reference,
            "base_input": [rule.arguments],
            "plus_input": [],
            "atol": rule.tolerance,
        }
        records.append(record)
        programs.append(header + rule.body)
    return records, programs


def test_the_rules_are_those_of_evalplus(tmp_path):
    records, programs = records_and_programs()
    verdicts = program_grading.run_sources(programs, load("mbpp-plus", tmp_path / "rows.jsonl", *records))
    assert [verdict.passed for verdict in verdicts] == [rule.passes for rule in RULES]


@pytest.mark.parametrize(("inputs", "status"), [([[0], [1]], "failed"), ([[1], [0]], "passed")])
def test_the_tolerance_for_floats_holds_for_the_inputs_that_follow(inputs, status, tmp_path):
    """The answer to 0 is no list of floats, so it has a tolerance only after the answer to 1, which is a float."""
    answers = "def f(x):\n    return [[[{answer_to_0}]], 0.1][x]\n"
    reference = answers.format(answer_to_0="0.1")
    record = {**MBPP, "canonical_solution": reference, "base_input": inputs, "plus_input": []}
    (row,) = load("mbpp-plus", tmp_path / "rows.jsonl", record)
    assert graded(row, answers.format(answer_to_0="0.1 + 1e-9")) == [status]


@pytest.mark.parametrize(
    ("number", "arguments", "expected"),
    [
        (2, [[1, 2], [3]], "((1, 2), (3,))"),
        (63, [[[1, 2], [3]]], "([(1, 2), (3,)],)"),
        (75, [[[1, 2]], 3], "([(1, 2)], 3)"),
        (106, [[1], [2]], "([1], (2,))"),
        (115, [[[1], [], {}]], "([{1}, {}, {}],)"),
        (124, ["1", "2j"], "(1.0, 2j)"),
        (250, [[1], 2], "((1,), 2)"),
        (252, ["1+2j"], "((1+2j),)"),
        (259, [[[1], [2]], [[3], [4]]], "(((1,), (2,)), ((3,), (4,)))"),
        (278, [[1, [2]]], "((1, (2,)),)"),
        (307, [[1], 2, 3], "((1,), 2, 3)"),
        (580, [[1, [2, [3]]]], "((1, (2, (3,))),)"),
        (722, [{"a": [1]}, 2], "({'a': (1,)}, 2)"),
        (3, [[1]], "([1],)"),
    ],
)
def test_arguments_have_the_types_of_mbpp(number, arguments, expected, tmp_path):
    shows_arguments = "def f(*args):\n    return repr(args)\n"
    record = {**MBPP, "task_id": f"Mbpp/{number}", "canonical_solution": shows_arguments}
    (row,) = load("mbpp-plus", tmp_path / "rows.jsonl", {**record, "base_input": [arguments], "plus_input": []})
    assert graded(row, f"def f(*args):\n    return {expected!r}", shows_arguments) == ["passed", "passed"]


FORGERIES = [
    """
class Equal(float):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
def f(x):
    return Equal(7)
""",
    """
import math, signal
signal.setitimer = math.sqrt = lambda *_, **__: True
def f(x):
    return 7.0
""",
    """
import sys
rules = sys.modules["lora_grpo.sandbox.evalplus"]
rules.Comparison.holds = rules._close = lambda *_: True
def f(x):
    return 7.0
""",
    """
import gc
def f(x):
    for candidate in gc.get_objects():
        if type(candidate).__name__ == "Comparison":
            return candidate._reference(x)
""",
]


@pytest.mark.parametrize("program", FORGERIES)
def test_a_program_cannot_forge_a_result(program, tmp_path):
    (row,) = load("humaneval-plus", tmp_path / "rows.jsonl", HUMANEVAL)
    assert graded(row, program) == ["failed"]


def test_a_call_that_takes_a_second_more_than_the_reference_ends_the_tests(tmp_path):
    (row,) = load("humaneval-plus", tmp_path / "rows.jsonl", HUMANEVAL)
    endless = "def f(x):\n    while x != 2: pass\n    return x / 2\n"
    slow = "import time\ndef f(x):\n    time.sleep(0.6)\n    return x / 2\n"
    sandbox.start(sandbox.Settings(timeout_seconds=1.0))
    try:
        started = time.monotonic()
        assert graded(row, slow, endless, f"while True: pass\n{slow}") == ["passed", "timeout", "timeout"]
        assert time.monotonic() - started < 20  # not a minute
    finally:
        sandbox.stop()


def test_training_rows_are_mbpps_and_evaluation_rows_all(tmp_path):
    records = [{**MBPP, "task_id": f"Mbpp/{number}"} for number in (2, 11, 601, 809)]
    rows = load("mbpp-plus", tmp_path / "rows.jsonl", *records)
    assert [row["id"] for row in rows] == ["mbpp/2", "mbpp/11", "mbpp/601", "mbpp/809"]
    rows = load("mbpp-plus", tmp_path / "rows.jsonl", *records, split="train")
    assert [row["id"] for row in rows] == ["mbpp/601", "mbpp/809"]


@pytest.fixture
def side():
    """The command of EvalPlus's side."""
    python = os.environ.get("LORA_GRPO_EVALPLUS_PYTHON")
    if not python:
        pytest.skip("LORA_GRPO_EVALPLUS_PYTHON, an interpreter with evalplus 0.3.1, is not set")
    return [python, str(Path(__file__).parents[1] / "helpers" / "evalplus_side.py")]


@pytest.mark.slow
def test_evalplus_has_these_rules(side, tmp_path):
    for name in ("humaneval.jsonl", "humaneval.programs.jsonl"):
        (tmp_path / name).touch()
    records, programs = records_and_programs()
    write_lines(tmp_path / "mbpp.jsonl", records)
    task_ids = [record["task_id"] for record in records]
    write_lines(tmp_path / "mbpp.programs.jsonl", zip(task_ids, programs, strict=True))
    subprocess.run([*side, "grade", str(tmp_path)], check=True)
    verdicts = json.loads((tmp_path / "verdicts.json").read_text(encoding="utf-8"))
    for rule, passed in zip(RULES, verdicts, strict=True):
        if rule.function != "find_zero":  # HumanEval/32 has no verdict there
            assert passed == rule.passes, rule


@pytest.mark.slow
def test_verdicts_are_those_of_evalplus(side, real_data, tmp_path):
    subprocess.run([*side, "rows", str(real_data), str(tmp_path)], check=True)
    generator = random.Random(0)
    verdicts = []
    programs = []  # with their names, for messages
    for dataset in ("humaneval", "mbpp"):
        names_and_sources = []
        rows_of_sources = []
        for row in get_task(f"{dataset}-plus").load("eval", str(tmp_path / f"{dataset}.jsonl")):
            name = row["id"].replace("mbpp/", "Mbpp/")
            for source in (row["answer"], *mutants(row["answer"], 3, generator, row["entry_point"])):
                names_and_sources.append((name, source))
                rows_of_sources.append(row)
        write_lines(tmp_path / f"{dataset}.programs.jsonl", names_and_sources)
        programs += names_and_sources
        verdicts += program_grading.run_sources([source for _, source in names_and_sources], rows_of_sources)

    subprocess.run([*side, "grade", str(tmp_path)], check=True)
    passed_in_evalplus = json.loads((tmp_path / "verdicts.json").read_text(encoding="utf-8"))
    names_of_different = set()
    for (name, source), verdict, passed in zip(programs, verdicts, passed_in_evalplus, strict=True):
        if verdict.passed != passed:
            names_of_different.add(name)
            print(f"{name}\n{source}\nhere {verdict.status} ({verdict.message}), EvalPlus {passed}\n")
    print(f"{len(programs)} programs, {sum(passed_in_evalplus)} pass in EvalPlus")
    assert names_of_different <= DIFFERENT
