"""HumanEval: its rows, and the grades of its 164 reference programs."""

import ast
import json

import pytest

from lora_grpo.tasks import get_task

HUMANEVAL = get_task("humaneval")
PROMPT = 'import math\n\n\ndef up(x):\n    return math.ceil(x)\n\n\ndef f(x):\n    """Round up and double."""\n'
RECORD = {
    "task_id": "HumanEval/7",
    "prompt": PROMPT,
    "entry_point": "f",
    "canonical_solution": "    return 2 * up(x)\n",
    "test": "def check(candidate):\n    assert candidate(1.5) == 2 * up(1.5)\n",
}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


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
    assert row["answer"] == PROMPT + "    return 2 * up(x)\n"
    assert row["prelude"] == row["completion_prefix"] == PROMPT
    assert row["test"].endswith("\n\ncheck(f)\n")
    assert row.pop("loaded_row") == {"id": "HumanEval/7", **RECORD}
    assert all(isinstance(value, str) for value in row.values())


def test_the_gold_completion_passes_in_every_style_and_a_wrong_one_does_not(tmp_path):
    (row,) = HUMANEVAL.load("eval", write(tmp_path / "h.jsonl", RECORD))
    for style in ("code", "xml", "think", "hashes", None):
        asked = {**row, "prompt_style": style}
        assert HUMANEVAL.check(HUMANEVAL.gold(asked), asked).passed, style
    verdict = HUMANEVAL.check(HUMANEVAL.gold(row).replace("2 *", "3 *"), row)
    assert (verdict.passed, verdict.reason) == (False, "failed")


def test_every_gold_completion_passes_and_every_near_miss_fails(rows):
    assert len(rows) == 164
    gold = HUMANEVAL.check_many([HUMANEVAL.gold(row) for row in rows], rows)
    assert [row["id"] for row, verdict in zip(rows, gold, strict=True) if not verdict.passed] == []
    missed = HUMANEVAL.check_many([f"```python\n{wrong(row)}\n```" for row in rows], rows)
    assert [row["id"] for row, verdict in zip(rows, missed, strict=True) if verdict.passed] == []


def test_every_raw_continuation_passes(rows):
    raw = [row["answer"].removeprefix(row["completion_prefix"]) + "\n\n\ndef spare():\n    return (" for row in rows]
    verdicts = HUMANEVAL.check_many(raw, rows)
    assert [row["id"] for row, verdict in zip(rows, verdicts, strict=True) if not verdict.passed] == []
