import copy
import math

import pytest

from lora_grpo.errors import RunError
from lora_grpo.rewards.guard import RewardError, guard
from lora_grpo.rewards.specs import parse_reward_specs, resolve

BATCH = {
    "prompts": [[{"role": "user", "content": "first?"}], [{"role": "user", "content": "second?"}]],
    "completions": ["one", [{"role": "assistant", "content": "two\nlines"}]],
    "completion_ids": [[1], [2]],
    "id": ["t/0", "t/1"],
    "question": ["first?", "second?"],
    "trainer_state": object(),
}


def failure(function, batch=BATCH):
    with pytest.raises(RewardError) as caught:
        guard(function, "mine")(**batch)
    assert isinstance(caught.value, RunError)
    assert "\n" not in str(caught.value)
    return caught.value


def test_good_values_pass_through_as_floats():
    def reward(completions, **columns):
        return [1, None]

    guarded = guard(reward, "mine")
    assert guarded(**BATCH) == [1.0, None]
    assert guarded.__name__ == "mine"
    assert guarded(["one", "two"]) == [1.0, None]


def test_a_reward_that_raises_names_the_line_of_its_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f(completions, **columns):\n    text = completions[0]\n    return [text['content']]\n")
    (reward,) = resolve(parse_reward_specs([f"{path}:f"]))
    with pytest.raises(RewardError, match=rf"^{path}:3: reward 'f' raised TypeError: "):
        reward.function(**BATCH)


def test_an_exception_that_cannot_be_printed_is_one_line_as_well():
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("broken")

    def reward(completions, **columns):
        raise Broken

    assert "raised Broken: no message, because its __str__ raised RuntimeError" in str(failure(reward))


def test_a_reward_cannot_change_what_others_get():
    def reward(completions, question, **columns):
        completions[1][0]["content"] = question[0] = ""
        completions.reverse()
        return [0.0 for _ in completions]

    before = copy.deepcopy({name: value for name, value in BATCH.items() if name != "trainer_state"})
    guard(reward, "mine")(**BATCH)
    assert {name: BATCH[name] for name in before} == before


def test_bools_numpy_and_torch_numbers_count():
    import numpy as np
    import torch

    assert guard(lambda completions, **c: [True, False], "mine")(**BATCH) == [1.0, 0.0]
    assert guard(lambda completions, **c: np.array([0.5, 1]), "mine")(**BATCH) == [0.5, 1.0]
    assert guard(lambda completions, **c: np.array([True, False]), "mine")(**BATCH) == [1.0, 0.0]
    assert guard(lambda completions, **c: torch.tensor([0.5, 1]), "mine")(**BATCH) == [0.5, 1.0]


def test_values_outside_0_to_1_are_said_once_by_name(capsys):
    guarded = guard(lambda completions, **c: [1 + 1e-7, -12.5], "mine")
    for _ in range(2):
        assert guarded(**BATCH) == [1 + 1e-7, -12.5]
    assert capsys.readouterr().err.count("note: reward 'mine' returned -12.5; other rewards are from 0 to 1") == 1
    guard(lambda completions, **c: [None, 1], "fine")(**BATCH)
    assert capsys.readouterr().err == ""


def test_a_raising_reward_names_the_row_and_keeps_the_cause():
    def reward(completions, question, **columns):
        return [1 / (q != "second?") for q in question]

    error = failure(reward)
    assert str(error) == (
        "reward 'mine' raised ZeroDivisionError: division by zero; "
        "row t/1, question 'second?', completion 'two\\nlines'"
    )
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_reward_that_raises_only_for_the_whole_batch():
    def reward(completions, **columns):
        if len(completions) > 1:
            raise ValueError("too\nmany")

    assert "raised ValueError: too; in a batch of 2, but for no row alone" in str(failure(reward))


def test_a_generator_that_raises_is_caught_too():
    def reward(completions, **columns):
        return (int(c) for c in ["1", "x"])

    assert "raised ValueError" in str(failure(reward))


def test_without_ids_and_questions_the_prompt_is_shown():
    batch = {"completions": ["x" * 999], "prompts": [[{"role": "user", "content": "first?"}]]}
    message = str(failure(lambda completions, **c: [math.nan], batch))
    assert "row 0, question 'first?', completion 'xxx" in message
    assert len(message) < 450


@pytest.mark.parametrize("output", [None, 1.0, "ab", {0: 1.0, 1: 2.0}])
def test_anything_but_a_list_is_refused(output):
    assert "expected a list of 2 numbers" in str(failure(lambda completions, **c: output))


@pytest.mark.parametrize("output", [[], [1.0], [1.0, 1.0, 1.0]])
def test_a_wrong_number_of_values_is_refused(output):
    assert f"returned {len(output)} values; expected a list of 2" in str(failure(lambda completions, **c: output))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "1.0", [1.0], 1j, object()])
def test_a_value_that_is_not_a_finite_number_is_refused_with_its_row(value):
    message = str(failure(lambda completions, **c: [0.0, value]))
    assert "expected a finite number, or None for a row that cannot be graded; row t/1" in message


def test_an_invalid_completion_is_shown_unchanged():
    batch = {"completions": [[{"role": "assistant", "content": None}]]}
    assert "completion [{'role'" in str(failure(lambda completions, **c: [math.nan], batch))
