import pytest

from lora_grpo.errors import UserError
from lora_grpo.tasks import registry
from lora_grpo.tasks.instructions import Instructions
from lora_grpo.tasks.reasoning_gym import Generator
from lora_grpo.tasks.registry import get_task

ROW = {"id": "a", "question": "?", "answer": "18"}


@pytest.mark.parametrize(
    ("name", "hint"), [("humanevall", "did you mean 'humaneval'"), ("starter_code", "'starter-code'"), ("x", "gsm8k")]
)
def test_an_unknown_task_is_told_the_nearest(name, hint):
    with pytest.raises(UserError, match=hint):
        get_task(name)


@pytest.mark.parametrize(
    ("task", "phrase"),
    [
        (get_task("gsm8k"), "final statement"),
        (get_task("starter"), "final statement"),
        (get_task("math"), "math-verify"),
        (get_task("aime24"), "math-verify"),
        (get_task("mbpp-plus"), "unit tests in the sandbox"),
        (get_task("humaneval"), "unit tests in the sandbox"),
        (get_task("bfcl"), "`Environment` in bfcl.py"),
        (Instructions("ifeval"), "if-verifiable"),
        (Generator("countdown"), "scorer"),
    ],
)
def test_reports_and_cards_say_how_the_answers_of_each_task_are_graded(task, phrase):
    assert phrase in task.grading and "\n" not in task.grading


def test_a_completion_without_its_row_is_no_wrong_answer():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        registry.grade_all("gsm8k", ["a", "b"], [ROW])
