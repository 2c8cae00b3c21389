"""HumanEval: its rows, and the grades of its 164 reference programs."""

import ast
import json

import pytest

from lora_grpo import sandbox
from lora_grpo.tasks import get_task

HUMANEVAL = get_task("humaneval")
PROMPT = 'import math\n\n\ndef up(x):\n    return math.ceil(x)\n\n\ndef f(x):\n    """Round up and double."""\n'
SOLUTION = "    return 2 * up(x)\n"
RECORD = {
    "task_id": "HumanEval/7",
    "prompt": PROMPT,
    "entry_point": "f",
    "canonical_solution": SOLUTION,
    "test": "def check(candidate):\n    assert candidate(1.5) == 2 * up(1.5)\n",
}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def patient_sandbox():
    """Let programs take their time: on a busy machine, a right one may exceed the limit that users have."""
    sandbox.start(sandbox.Settings(timeout_seconds=60.0))
    yield
    sandbox.stop()


@pytest.fixture(scope="module")
def rows(real_data):
    return HUMANEVAL.load("eval", str(real_data / "humaneval" / "HumanEval.jsonl.gz"))


def wrong(row):
    """Return the reference solution with every `return` changed to a value that no test expects."""
    tree = ast.parse(row["answer"])
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            node.value = ast.Constant("no such value")
    return ast.unparse(tree)


def test_a_row_has_texts_and_keeps_upstreams_id(tmp_path):
    (row,) = HUMANEVAL.load("train", write(tmp_path / "h.jsonl", RECORD))
    assert row["id"] == "HumanEval/7"
    assert row["question"].endswith(f"```python\n{PROMPT.strip()}\n```")
    assert row["answer"] == PROMPT + SOLUTION
    assert row["prelude"] == row["completion_prefix"] == PROMPT
    assert row["test"].endswith("\n\ncheck(f)\n")
    assert row.pop("loaded_row") == {"id": "HumanEval/7", **RECORD}
    assert all(isinstance(value, str) for value in row.values())


@pytest.mark.parametrize("style", ["code", "xml", "think", "hashes", None])
def test_the_gold_completion_passes_in_every_style(tmp_path, style):
    (row,) = HUMANEVAL.load("eval", write(tmp_path / "h.jsonl", RECORD))
    styled = {**row, "prompt_style": style}
    assert HUMANEVAL.check(HUMANEVAL.gold(styled), styled).passed


def test_a_wrong_completion_does_not_pass(tmp_path):
    (row,) = HUMANEVAL.load("eval", write(tmp_path / "h.jsonl", RECORD))
    verdict = HUMANEVAL.check(f"```python\n{PROMPT}    return 3 * up(x)\n```", row)
    assert (verdict.passed, verdict.reason) == (False, "failed")


def ids_of(rows, verdicts, *, passed):
    """Return the ids of the rows whose completions passed, or did not."""
    return [row["id"] for row, verdict in zip(rows, verdicts, strict=True) if verdict.passed == passed]


def test_every_gold_completion_passes_and_every_near_miss_fails(rows):
    assert len(rows) == 164
    verdicts = HUMANEVAL.check_many([HUMANEVAL.gold(row) for row in rows], rows)
    assert ids_of(rows, verdicts, passed=False) == []
    verdicts = HUMANEVAL.check_many([f"```python\n{wrong(row)}\n```" for row in rows], rows)
    assert ids_of(rows, verdicts, passed=True) == []


def test_every_raw_continuation_passes(rows):
    """As of a base model, which goes on with another function until it is cut."""
    next_function = "\n\n\ndef spare():\n    return ("
    continuations = [row["answer"].removeprefix(row["completion_prefix"]) + next_function for row in rows]
    assert ids_of(rows, HUMANEVAL.check_many(continuations, rows), passed=False) == []
