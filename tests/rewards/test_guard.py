import copy
import math

import pytest

from lora_grpo.rewards import RewardError, parse_reward_specs, resolve
from lora_grpo.rewards.specs import guard

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
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 450
    return str(caught.value)


@pytest.mark.parametrize(
    ("returned", "values"),
    [
        ("[1, None]", [1.0, None]),
        ("[True, False]", [1.0, 0.0]),
        ("(0.5, 1)", [0.5, 1.0]),
        ("__import__('numpy').array([0.5, 1])", [0.5, 1.0]),
        ("__import__('numpy').array([True, False])", [1.0, 0.0]),
        ("__import__('torch').tensor([0.5, 1])", [0.5, 1.0]),
    ],
)
def test_numbers_pass_through_as_floats(returned, values):
    guarded = guard(lambda completions, **columns: eval(returned), "mine")
    assert guarded.__name__ == "mine"
    assert guarded(**BATCH) == values
    assert [type(value) for value in guarded(**BATCH)] == [type(value) for value in values]


@pytest.mark.parametrize("output", [None, 1.0, "ab", {"a": 1.0, "b": 1.0}, [], [1.0], [1.0, 1.0, 1.0]])
def test_anything_but_a_list_of_as_many_numbers_is_refused(output):
    assert "reward 'mine' r" in failure(lambda completions, **columns: output)


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
    guard(reward, "mine")(**BATCH)
    assert {name: BATCH[name] for name in before} == before
