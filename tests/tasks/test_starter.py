import subprocess
import sys

import pytest

from lora_grpo.errors import UserError
from lora_grpo.tasks.registry import get_task

starter = get_task("starter")


def test_rows_are_numbered_and_complete():
    rows = starter.load("eval", None, None, 0)
    assert len(rows) == 1000
    assert rows[12]["id"] == "starter/eval/00012"
    assert set(rows[0]) == {"id", "question", "answer", "family", "difficulty"}
    assert len({row["question"] for row in rows}) == 1000


def test_train_and_eval_are_disjoint():
    train = {row["question"] for row in starter.load("train", None, None, 0)}
    assert len(train) == 4000
    assert not train & {row["question"] for row in starter.load("eval", None, None, 0)}


def test_limit_draws_by_seed_and_keeps_order_and_ids():
    rows = starter.load("eval", None, 5, 1)
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    assert rows == starter.load("eval", None, 5, 1)
    assert rows != starter.load("eval", None, 5, 2)
    everything = {row["id"]: row for row in starter.load("eval", None, None, 7)}
    assert all(everything[row["id"]] == row for row in rows)
    assert len(starter.load("eval", None, 5000, 0)) == 1000


@pytest.mark.parametrize(
    ("split", "source", "limit", "message"),
    [
        ("eval", "x.jsonl", None, "leave the source out"),
        ("test", None, None, "expected one of train, eval"),
        ("eval", None, 0, "at least 1"),
    ],
)
def test_mistakes_are_named(split, source, limit, message):
    with pytest.raises(UserError, match=message):
        starter.load(split, source, limit, 0)


@pytest.mark.parametrize("style", ["xml", "hashes", "think"])
def test_gold_completion_passes_and_a_wrong_one_does_not(style):
    for row in starter.load("eval", None, 60, 0):
        asked = {**row, "prompt_style": style}
        gold = starter.gold_completion(asked)
        verdict = starter.grade(gold, asked)
        assert verdict.passed
        assert verdict.rules["strict"]
        wrong = gold.replace(verdict.extracted, verdict.extracted + "7")
        assert not starter.grade(wrong, asked).passed


def test_loading_needs_no_torch():
    program = (
        "import sys; from lora_grpo.tasks import starter; starter.load('train', None, None, 0); "
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
