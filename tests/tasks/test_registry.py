import pytest

from lora_grpo.errors import UserError
from lora_grpo.tasks import registry
from lora_grpo.tasks.registry import get_task

ROW = {"id": "a", "question": "?", "answer": "18"}


@pytest.mark.parametrize(
    ("name", "hint"), [("humanevall", "did you mean 'humaneval'"), ("starter_code", "'starter-code'"), ("x", "gsm8k")]
)
def test_an_unknown_task_is_told_the_nearest(name, hint):
    with pytest.raises(UserError, match=hint):
        get_task(name)


def test_a_completion_without_its_row_is_no_wrong_answer():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        registry.grade_all("gsm8k", ["a", "b"], [ROW])
