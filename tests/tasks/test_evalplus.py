"""HumanEval+ and MBPP+: rows of both published forms, EvalPlus's rules, and its verdicts."""

import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest
from helpers.mutants import mutants

from lora_grpo import sandbox
from lora_grpo.errors import UserError
from lora_grpo.grading import programs as program_grading
from lora_grpo.tasks import get_task

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
HUB_TEST = """import numpy as np

def assertion(out, exp, atol):
    assert np.allclose(out, exp, rtol=1e-07, atol=atol)

{indent}inputs = [[2], [3], [inf]]
{indent}results = [1.0, 1.5, inf]
{indent}for i, (inp, exp) in enumerate(zip(inputs, results)):
{indent}    assertion({call}(*inp), exp, 0.25)
"""


def load(task, path, *records, split="eval"):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return get_task(task).load(split, str(path))


def graded(row, *programs):
    return [verdict.status for verdict in program_grading.run_sources(programs, [row] * len(programs))]


@pytest.mark.parametrize("task", ["humaneval-plus", "mbpp-plus"])
def test_every_input_is_compared_with_the_reference(task, tmp_path):
    (row,) = load(task, tmp_path / "rows.jsonl", HUMANEVAL if task == "humaneval-plus" else MBPP)
    right, base_only = "def f(x):\n    return x * 0.5\n", "def f(x):\n    return 1.0\n"
    verdicts = program_grading.run_sources([right, base_only, "def f(x):\n    return x\n"], [row] * 3)
    assert [verdict.status for verdict in verdicts] == ["passed", "failed", "failed"]
    assert [(verdict.passed_tests, verdict.num_tests) for verdict in verdicts] == [(2, 2), (1, 2), (0, 2)]
    assert get_task(task).check(get_task(task).gold(row), row).passed
    assert "1.5" not in row["question"] + row["test"] + row["prelude"]


def test_rows_of_the_hub_have_the_inputs_and_tolerance_of_their_test_program(tmp_path):
    test = "def check(candidate):\n" + HUB_TEST.format(indent="    ", call="candidate") + "\ncheck(f)\n"
    (row,) = load("humaneval-plus", tmp_path / "h.jsonl", {**HUB, "test": test})
    near, far = "def f(x):\n    return x / 2 + 0.2\n", "def f(x):\n    return x / 2 + 0.3\n"
    assert graded(row, row["answer"], near, far) == ["passed", "passed", "failed"]
    record = {"task_id": 602, "prompt": "Write a function to halve a number.", "code": MBPP["canonical_solution"]}
    record |= {
        "test_list": ['assert f(2) == "one"', "assert f(3) == 1.5"],
        "test": HUB_TEST.format(indent="", call="f"),
    }
    (other,) = load("mbpp-plus", tmp_path / "m.jsonl", record)
    assert graded(other, other["answer"], near, far) == ["passed", "passed", "failed"]
    (released,) = load("mbpp-plus", tmp_path / "r.jsonl", MBPP)
    assert (other["id"], other["question"]) == (released["id"], released["question"])
    assert released["question"].endswith(
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
def test_a_malformed_row_is_named(change, tmp_path):
    for task, record in (("humaneval-plus", HUMANEVAL), ("mbpp-plus", MBPP)):
        with pytest.raises(UserError, match=r"rows\.jsonl:1"):
            load(task, tmp_path / "rows.jsonl", {**record, **change})
    with pytest.raises(UserError, match=r"rows\.jsonl:1"):
        load("humaneval-plus", tmp_path / "rows.jsonl", {**HUB, "test": "pass"})


DIFFERENT = {"HumanEval/32"}
"""Tasks whose verdicts differ from EvalPlus's: docs/decisions/0031-verdicts-of-published-graders.md."""

# name, reference, arguments, tolerance, program, whether it passes
RULES = [
    ("f", "return [0.1, 0.2]", [], 0, "return [0.1, 0.2 + 1e-7]", True),
    ("f", "return [0.1, 0.2]", [], 0, "return [0.1, 0.2 + 1e-5]", False),
    ("f", "return [0.1, 0.2]", [], 0, "return (0.1, 0.2)", False),  # another type
    ("f", "return [0.1, 0.2]", [], 0, "return [0.1]", False),
    ("f", "return [[0.1]]", [], 0, "return [[0.1 + 1e-9]]", False),  # not a list of floats
    ("f", "return [[0.1]]", [], 0.01, "return [[0.1 + 1e-3]]", True),
    ("f", "return [[0.1], [0.1]]", [], 0.01, "return [[0.1], 0.1]", False),
    ("f", "return [[0.1, 0.1]]", [], 0.01, "return [[0.1], [0.1001]]", False),  # another shape
    ("f", "return ['a', 0.5]", [], 0.01, "return ['a', 0.5001]", False),  # no array of numbers
    ("f", "return 1", [], 0.5, "return 1.0", True),
    ("f", "return 1.0", [], 0.5, "return 1", True),
    ("f", "return 2.0", [], 0.5, "return 1", False),
    ("f", "return 10**30", [], 0.5, "return 10**30 + 1", True),
    ("f", "return 10**30", [], 0.5, "return 10**30 + 10**25", False),
    ("f", "return [10**30]", [], 0.5, "return [10**30 + 1]", False),  # no number of NumPy
    ("f", "return [2**63]", [], 0.5, "return [2**63 + 1]", True),
    ("f", "return True", [], 0.5, "return False", False),
    ("f", "return {'a': 0.5}", [], 0.5, "return {'a': 0.4}", False),
    ("f", "return [1, 2.0, 3j]", [], 0.5, "return [1.1, 2, 3.1j]", True),
    ("f", "return [[], []]", [], 0.5, "return [[], []]", True),
    ("f", "return ((1, 2.5), (3, 4))", [], 0.1, "return ([1, 2.45], [3, 4])", True),
    ("f", "return float('inf')", [], 0, "return 1e308", False),
    ("f", "return float('nan')", [], 0, "return float('nan')", False),
    ("f", "return None", [], 0, "return", True),
    ("f", "return None", [], 0, "raise ValueError", False),
    ("check_str", "import re; return re.match('a', x)", ["a"], 0, "return object()", True),
    ("check_str", "import re; return re.match('a', x)", ["b"], 0, "return object()", False),
    ("check_str", "import re; return re.match('a', x)", ["b"], 0, "return False", True),
    ("Diff", "return [x, 1]", [2], 0, "return (1, x, x)", True),
    ("Diff", "return [x, 1]", [2], 0, "return [x]", False),
    ("are_equivalent", "return True", [1], 0, "return None", True),
    ("sum_div", "return 5", [1], 0, "return 0", True),
    ("sum_div", "return 5", [1], 0, "return 4", False),
    ("surface_Area", "return 33", [3, 4], 0, "return 35", True),
    ("surface_Area", "return 33", [3, 4], 0, "return 34", False),
    ("digit_distance_nums", "return 0", [123, 256], 0, "return 7", True),
    ("digit_distance_nums", "return 0", [1, 23], 0, "return 4", True),
    ("digit_distance_nums", "return 0", [1, 23], 0, "return 5", False),
    ("find_zero", "return -0.5", [[1, 2]], 1e-4, "return -0.50001", True),
    ("find_zero", "return 9.0", [[-6, 11, -6, 1]], 1e-4, "return 3.0", True),
    ("find_zero", "return -0.5", [[1, 2]], 1e-4, "return -0.6", False),
    ("find_zero", "return -0.5", [[1, 2]], 1e-4, "x.clear(); return 7", False),
]


def ruled():
    """Return the rows of the rules, in the form of a release, and the programs."""
    records, programs = [], []
    for number, (name, reference, call, atol, program, _) in enumerate(RULES, 900):
        header = f"def {name}({', '.join('xy'[: len(call)])}):\n    "
        inputs = {"base_input": [call], "plus_input": [], "atol": atol}
        records.append({**MBPP, "task_id": f"Mbpp/{number}", "entry_point": name, **inputs})
        records[-1]["canonical_solution"] = header + reference
        programs.append(header + program)
    return records, programs


def test_the_rules_are_those_of_evalplus(tmp_path):
    records, programs = ruled()
    verdicts = program_grading.run_sources(programs, load("mbpp-plus", tmp_path / "rows.jsonl", *records))
    assert [verdict.passed for verdict in verdicts] == [rule[-1] for rule in RULES]


def test_the_tolerance_for_floats_holds_for_the_inputs_that_follow(tmp_path):
    answers = "def f(x):\n    return [[[0.1]], 0.1][x]\n"
    for order, status in (([[0], [1]], "failed"), ([[1], [0]], "passed")):
        record = {**MBPP, "canonical_solution": answers, "base_input": order, "plus_input": []}
        (row,) = load("mbpp-plus", tmp_path / "rows.jsonl", record)
        assert graded(row, answers.replace("[[[0.1]", "[[[0.1 + 1e-9]")) == [status]


@pytest.mark.parametrize(
    ("number", "call", "expected"),
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
def test_arguments_have_the_types_of_mbpp(number, call, expected, tmp_path):
    record = {**MBPP, "task_id": f"Mbpp/{number}", "canonical_solution": "def f(*args):\n    return repr(args)\n"}
    (row,) = load("mbpp-plus", tmp_path / "rows.jsonl", {**record, "base_input": [call], "plus_input": []})
    assert (
        graded(row, f"def f(*args):\n    return {expected!r}", "def f(*args):\n    return repr(args)") == ["passed"] * 2
    )


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
    for each in gc.get_objects():
        if type(each).__name__ == "Comparison":
            return each._reference(x)
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
    records, programs = ruled()
    pairs = [[record["task_id"], program] for record, program in zip(records, programs, strict=True)]
    for name, lines in (("mbpp.jsonl", records), ("mbpp.programs.jsonl", pairs)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    subprocess.run([*side, "grade", str(tmp_path)], check=True)
    theirs = json.loads((tmp_path / "verdicts.json").read_text(encoding="utf-8"))
    compared = [(*rule, passed) for rule, passed in zip(RULES, theirs, strict=True) if rule[0] != "find_zero"]
    assert [rule for rule in compared if rule[-1] != rule[-2]] == []  # HumanEval/32 has no verdict there


@pytest.mark.slow
def test_verdicts_are_those_of_evalplus(side, real_data, tmp_path):
    subprocess.run([*side, "rows", str(real_data), str(tmp_path)], check=True)
    ours, asked, rng = [], [], random.Random(0)
    for dataset in ("humaneval", "mbpp"):
        rows = get_task(f"{dataset}-plus").load("eval", str(tmp_path / f"{dataset}.jsonl"))
        pairs = [
            (row["id"].replace("mbpp/", "Mbpp/"), source, row)
            for row in rows
            for source in (row["answer"], *mutants(row["answer"], 3, rng, row["entry_point"]))
        ]
        lines = [json.dumps([name, source]) + "\n" for name, source, _ in pairs]
        (tmp_path / f"{dataset}.programs.jsonl").write_text("".join(lines), encoding="utf-8")
        asked += [f"{name}\n{source}" for name, source, _ in pairs]
        ours += program_grading.run_sources([source for _, source, _ in pairs], [row for *_, row in pairs])
    subprocess.run([*side, "grade", str(tmp_path)], check=True)
    theirs = json.loads((tmp_path / "verdicts.json").read_text(encoding="utf-8"))
    differing = [
        f"{program}\nhere {verdict.status} ({verdict.message}), EvalPlus {passed}\n"
        for program, verdict, passed in zip(asked, ours, theirs, strict=True)
        if verdict.passed != passed
    ]
    print(f"{len(asked)} programs, {sum(theirs)} pass in EvalPlus, {len(differing)} differ", *differing, sep="\n")
    assert {text.partition("\n")[0] for text in differing} <= DIFFERENT
