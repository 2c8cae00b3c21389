"""The bundled problems: their rows, and the grades of their references."""

import json

import pytest

from lora_grpo.tasks import sources
from lora_grpo.tasks.registry import get_task

starter = get_task("starter")
starter_code = get_task("starter-code")
COLUMNS = {
    "starter": ["id", "question", "answer", "family", "difficulty"],
    "starter-code": ["id", "question", "answer", "entry_point", "test", "prelude", "family"],
}


@pytest.mark.parametrize("name", ["starter", "starter-code"])
def test_rows_are_numbered_flat_and_distinct(name):
    rows = get_task(name).load("eval")
    assert len(rows) == len({row["question"] for row in rows}) == 1000
    assert rows[12]["id"] == f"{name}/eval/00012"
    assert list(rows[0]) == COLUMNS[name]
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize("style", ["xml", "hashes", "think"])
def test_gold_completion_passes_and_a_wrong_one_does_not(style):
    for row in sources.sample(starter.load("eval"), 60, 0):
        styled = {**row, "prompt_style": style}
        gold = starter.gold(styled)
        verdict = starter.check(gold, styled)
        assert verdict.passed
        assert verdict.rules["strict"]
        wrong = starter.gold({**styled, "answer": f"{row['answer']}7"})
        assert not starter.check(wrong, styled).passed


def test_gold_completion_of_code_is_the_solution_in_a_block_and_passes():
    rows = sources.sample(starter_code.load("eval"), 60, 0)
    golds = [starter_code.gold(row) for row in rows]
    assert golds == [f"```python\n{row['answer']}\n```" for row in rows]
    assert all(row["entry_point"] in row["question"] for row in rows)
    assert all(verdict.passed for verdict in starter_code.check_many(golds, rows))
