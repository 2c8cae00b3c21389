"""Mathematics: rows of benchmarks and of files, and their references."""

import json

import pytest

from lora_grpo.config import RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.errors import UserError
from lora_grpo.grading import mathematics
from lora_grpo.prompts import chat, styles
from lora_grpo.tasks import get_task

TASK = get_task("math")
ROWS = [
    {"problem": "Half of a half?", "solution": "It is $\\frac12\\cdot\\frac12=\\boxed{\\frac14}$.", "level": "Level 1"},
    {"problem": "Solve x^2=1.", "answer": "-1, 1"},
    {"question": "Who wins?", "answer": "\\text{Evelyn}"},
    {"question": "2+2?", "answer": 4},
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.mark.parametrize("style", ["xml", "hashes", "think", "boxed"])
def test_references_pass_in_every_style(path, style):
    rows = chat.add_prompts(TASK.load("eval", path), style)
    assert [row["id"] for row in rows] == ["rows/0", "rows/1", "rows/2", "rows/3"]
    for row in rows:
        completion = TASK.gold(row)
        assert TASK.check(completion, row).passed
        answer = mathematics.final_answer(row)
        assert styles.read_completion(completion, style)[1] == answer
    assert rows[0]["level"] == "Level 1" and "\\cdot" in TASK.gold(rows[0])


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"problem": "?", "solution": "\\boxed{}"}, "rows.jsonl:1"),
        ({"problem": "?"}, "answer"),
        ({"problem": "?", "solution": "Half of 4 is $2$, so the answer is 2."}, "rows.jsonl:1: .*boxed"),
    ],
    ids=["an empty box", "no answer", "a solution without a box"],
)
def test_a_row_without_an_answer_is_named(tmp_path, row, word):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match=word):
        TASK.load("eval", str(path))


def test_a_solution_may_have_a_box_without_braces(tmp_path):
    """As two of MATH have."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "?", "solution": "We want the largest value, so it is $\\boxed 2$."}))
    (row,) = TASK.load("train", str(path))
    assert mathematics.final_answer(row) == "2"
    assert TASK.check("\\boxed{2}", row).passed and not TASK.check("\\boxed{3}", row).passed


@pytest.mark.parametrize("name", ["math500", "aime24", "aime25"])
def test_benchmarks_have_no_training_rows(path, name):
    with pytest.raises(UserError, match="--task math"):
        get_task(name).load("train")
    assert get_task(name).load("eval", path)


def test_a_run_may_train_on_one_file_and_be_evaluated_on_another(path, tmp_path):
    train = tmp_path / "train.jsonl"
    rows = [{"question": f"{number}+1?", "answer": number + 1} for number in range(20)]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"task": "math", "train": str(train), "eval": path, "prompt_style": "boxed"}
    loaded = load_data(replace(RunConfig(), {"data": data}))
    assert (len(loaded.train), len(loaded.eval)) == (20, 4)
    assert "\\boxed{}" in loaded.train[0]["prompt"][0]["content"]
