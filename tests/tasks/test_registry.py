import pytest

from lora_grpo.errors import UserError
from lora_grpo.tasks import gsm8k, registry
from lora_grpo.tasks.registry import TASK_NAMES, Verdict, get_task

ROW = {"id": "a", "question": "?", "answer": "18"}


@pytest.mark.parametrize("name", TASK_NAMES)
def test_every_task_has_the_functions_of_the_protocol(name):
    task = get_task(name)
    assert all(callable(getattr(task, function)) for function in ("load", "check", "gold"))


@pytest.mark.parametrize(
    ("name", "hint"), [("humanevall", "did you mean 'humaneval'"), ("starter_code", "'starter-code'"), ("x", "gsm8k")]
)
def test_an_unknown_task_is_told_the_nearest(name, hint):
    with pytest.raises(UserError, match=hint):
        get_task(name)


def test_completions_are_graded_one_by_one_where_a_task_has_nothing_faster():
    completions = ["#### 18", "#### 19"]
    verdicts = registry.grade_all("gsm8k", completions, [ROW, ROW])
    assert verdicts == [gsm8k.check(completion, ROW) for completion in completions]
    assert [verdict.passed for verdict in verdicts] == [True, False]


def test_a_task_that_grades_many_is_asked_once(monkeypatch):
    calls = []

    def check_many(completions, rows):
        calls.append((list(completions), list(rows)))
        return (Verdict(True, "passed") for _ in completions)

    monkeypatch.setattr(gsm8k, "check_many", check_many, raising=False)
    assert registry.grade_all("gsm8k", ["a", "b"], [ROW, ROW]) == [Verdict(True, "passed")] * 2
    assert calls == [(["a", "b"], [ROW, ROW])]


def test_a_completion_without_its_row_is_no_wrong_answer():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        registry.grade_all("gsm8k", ["a", "b"], [ROW])
