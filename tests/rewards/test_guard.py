"""Rewards of users are guarded: what they return is checked, and what they raise names the line and the row."""

import copy
import math

import numpy
import pytest
import torch

from lora_grpo.rewards import RewardError, parse_reward_specs, resolve
from lora_grpo.rewards.guard import GuardedReward

BATCH = {
    "prompts": [[{"role": "user", "content": "first?"}], [{"role": "user", "content": "second?"}]],
    "completions": ["one", [{"role": "assistant", "content": "two\nlines"}]],
    "completion_ids": [[1], [2]],
    "id": ["t/0", "t/1"],
    "question": ["first?", "second?"],
    "trainer_state": object(),
}


def failure(function, batch=BATCH):
    """Return the one line that a batch ends with."""
    with pytest.raises(RewardError) as error:
        GuardedReward(function, "mine")(**batch)
    message = str(error.value)
    assert "\n" not in message and len(message) < 450
    return message


@pytest.mark.parametrize(
    ("returned", "values"),
    [
        ([1, None], [1.0, None]),
        ([True, False], [1.0, 0.0]),
        ((0.5, 1), [0.5, 1.0]),
        (numpy.array([0.5, 1]), [0.5, 1.0]),
        (numpy.array([True, False]), [1.0, 0.0]),
        (numpy.array([[0.5], [1]]), [0.5, 1.0]),
        ([numpy.float32(0.5), numpy.int64(1)], [0.5, 1.0]),
        (torch.tensor([0.5, 1]), [0.5, 1.0]),
        (torch.tensor([[0.5], [1]]), [0.5, 1.0]),
        ((number for number in (0.5, 1)), [0.5, 1.0]),
        (map(float, ("0.5", "1")), [0.5, 1.0]),
    ],
)
def test_numbers_pass_through_as_floats(returned, values):
    guarded = GuardedReward(lambda completions, **columns: returned, "mine")
    assert guarded.__name__ == "mine"
    checked_values = guarded(**BATCH)
    assert checked_values == values
    assert [type(value) for value in checked_values] == [type(value) for value in values]


@pytest.mark.parametrize(
    "output", [None, 1.0, "ab", b"ab", {"a": 1.0, "b": 1.0}, {1.0, 0.5}, [], [1.0], [1.0, 1.0, 1.0]]
)
def test_anything_but_a_list_of_as_many_numbers_is_refused(output):
    message = failure(lambda completions, **columns: output)
    assert "reward 'mine' returned" in message and "expected a list of 2 numbers" in message


def test_a_reward_that_returns_nothing_is_named_so():
    def forgets(completions, **columns):
        [0.0 for _ in completions]

    async def forgets_later(completions, **columns):
        forgets(completions)

    async def yields(completions, **columns):
        yield 0.0

    assert "returned None; expected a list of 2 numbers" in failure(forgets)
    assert "returned None; expected a list of 2 numbers" in failure(forgets_later)
    assert "returned <async_generator" in failure(yields)


def test_a_generator_that_raises_is_a_reward_that_raises():
    assert "raised ZeroDivisionError" in failure(lambda completions, **columns: (1 / 0 for _ in completions))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "1.0", [1.0], 1j, object()])
def test_a_value_that_is_not_a_finite_number_is_refused_with_its_row(value):
    message = failure(lambda completions, **columns: [0.0, value])
    assert "expected a finite number" in message and "row t/1, completion 'two\\nlines'" in message


def test_a_raising_reward_names_its_line_and_the_row_and_keeps_the_cause(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f(completions, question, **columns):\n    return [1 / (q != 'second?') for q in question]\n")
    (reward,) = resolve(parse_reward_specs([f"{path}:f"]))
    with pytest.raises(RewardError, match=rf"^{path}:2: reward 'f' raised ZeroDivisionError: .*; row t/1") as caught:
        reward.function(**BATCH)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_reward_cannot_change_what_others_get():
    def reward(completions, question, **columns):
        completions[1][0]["content"] = question[0] = ""
        completions.reverse()
        return [0.0 for _ in completions]

    before = copy.deepcopy({name: value for name, value in BATCH.items() if name != "trainer_state"})
    GuardedReward(reward, "mine")(**BATCH)
    assert {name: BATCH[name] for name in before} == before
