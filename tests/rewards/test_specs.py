"""`NAME=WEIGHT`: what names a reward, what is refused before it is called, and files of users."""

import pytest

from lora_grpo.errors import UserError
from lora_grpo.rewards.specs import parse_reward_specs, resolve

GOOD_FILE = """
from dataclasses import dataclass
calls = []
def my_reward(completions, **columns):
    calls.append(1)
    return [float(len(calls))] * len(completions)
other = lambda completions, **columns: [float(len(calls))] * len(completions)
def narrow(completions):
    return [1.0]
@dataclass
class Settings:
    cap: "int" = 1
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(GOOD_FILE)
    return path


def parse_one(item):
    (spec,) = parse_reward_specs([item])
    return spec.name, spec.weight


@pytest.mark.parametrize(
    ("item", "name", "weight"),
    [
        ("correct_answer=2.0", "correct_answer", 2.0),
        ("correct_answer", "correct_answer", 2.0),
        ("near_length:50tokens=0.25", "near_length:50tokens", 0.25),
        ("longer_is_better", "longer_is_better", 1.0),
        ("soft_overlong_punishment:1000,200=0.5", "soft_overlong_punishment:1000,200", 0.5),
        ("pattern:x=(5)=1", "pattern:x=(5)", 1.0),
        ("pattern:(?m)^a:b.py:c$=1", "pattern:(?m)^a:b.py:c$", 1.0),
    ],
)
def test_a_spec_is_a_name_and_a_weight(item, name, weight):
    assert parse_one(item) == (name, weight)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "no rewards; name at least one"),
        (["corect_answer=1"], "unknown reward 'corect_answer'; did you mean 'correct_answer'?"),
        (["correct_answer=much"], "weight 'much' is not a finite number; write correct_answer=1.0"),
        (["correct_answer=1", "correct_answer=2"], "reward 'correct_answer' is listed 2 times"),
        (["near_length"], "write near_length:200 or near_length:50tokens"),
        (["cosine_scaled:"], "write cosine_scaled:200 or cosine_scaled:50tokens"),
        (["repetition_penalty:3tokens"], "write repetition_penalty:3"),
        (["soft_overlong_punishment"], "write soft_overlong_punishment:1000,200"),
        (["soft_overlong_punishment:200"], "write soft_overlong_punishment:1000,200"),
        (["soft_overlong_punishment:9,10"], "write soft_overlong_punishment:1000,200"),
        (["pattern:^a$"], "needs its weight; write pattern:^a$=1.0"),
        (["pattern:(=1"], "not a regular expression"),
        (["pattern=1.0"], "needs a regular expression"),
        (["pattern:=1.0"], "needs a regular expression"),
        (["missing.py:my_reward=1"], "missing.py: No such file"),
    ],
)
def test_a_wrong_spec_says_what_to_write(items, message):
    with pytest.raises(UserError) as error:
        parse_reward_specs(items)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("my_rewrad", "does not define 'my_rewrad'; did you mean 'my_reward'?"),
        ("narrow", ":8: 'narrow' must take **columns"),
    ],
)
def test_a_users_file_is_checked_before_it_is_run(file, function, message):
    with pytest.raises(UserError) as error:
        parse_reward_specs([f"{file}:{function}"])
    assert message in str(error.value)


def test_checking_does_not_run_the_file_and_resolving_does(tmp_path):
    path = tmp_path / "my.py"
    path.write_text("def f(completions, **columns):\n    return [1.0]\n\nraise KeyError('no\\nkey')\n")
    specs = parse_reward_specs([f"{path}:f"])
    with pytest.raises(UserError) as error:
        resolve(specs)
    assert f"{path}:4: importing this file raised KeyError" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_value_that_is_no_function_is_refused(file):
    with pytest.raises(UserError, match=r"my_rewards.py: 'calls' is \[\]; expected a function"):
        resolve(parse_reward_specs([f"{file}:calls"]))


def test_a_users_functions_run_guarded_under_their_own_names(file):
    first, second = resolve(parse_reward_specs([f"{file}:my_reward=0.5", f"{file}:other"]))
    assert (first.name, first.weight, first.function.__name__) == ("my_reward", 0.5, "my_reward")
    assert first.function(completions=["a", "b"]) == [1.0, 1.0]
    assert second.function(completions=["a"]) == [1.0]  # Same module, because the file ran only once.


def test_rewards_of_the_same_kind_get_numbered_names():
    resolved = resolve(parse_reward_specs(["pattern:a=1", "pattern:b=1", "near_length:1", "correct_answer"]))
    assert [reward.name for reward in resolved] == ["pattern", "pattern_2", "near_length", "correct_answer"]
    assert [reward.function.__name__ for reward in resolved] == [reward.name for reward in resolved]
    assert [reward.function(completions=["b"])[0] for reward in resolved[:3]] == [0.0, 1.0, 1.0]


CALLABLES = """
import functools

def narrowed(function):
    @functools.wraps(function)
    def wrapper(completions, **columns):
        return function(completions, columns["factor"])
    return wrapper

def same(function):
    return function

@narrowed
def scaled(completions, factor):
    return [factor[0]] * len(completions)

@same
def still_narrow(completions):
    return [1.0]

class Scorer:
    def __call__(self, completions, **columns):
        return [2.0] * len(completions)
    def method(self, completions, **columns):
        return [3.0] * len(completions)
    def narrow(self, completions):
        return [3.0]

instance = Scorer()
method = Scorer().method
narrow_method = Scorer().narrow
some = lambda completions, **columns: [4.0] * len(completions)
partial = functools.partial(lambda completions, value, **columns: [value] * len(completions), value=5.0)

async def later(completions, **columns):
    return [6.0] * len(completions)

async def narrow_later(completions):
    return [6.0]
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [("scaled", 1.5), ("instance", 2.0), ("method", 3.0), ("some", 4.0), ("partial", 5.0), ("later", 6.0)],
)
def test_whatever_takes_all_columns_is_a_reward(tmp_path, name, value):
    path = tmp_path / "callables.py"
    path.write_text(CALLABLES)
    (reward,) = resolve(parse_reward_specs([f"{path}:{name}"]))
    assert (reward.name, reward.function.__name__) == (name, name)
    assert reward.function(completions=["a"], prompts=["?"], factor=[1.5]) == [value]


@pytest.mark.parametrize("name", ["still_narrow", "narrow_method", "narrow_later", "Scorer"])
def test_what_does_not_take_all_columns_is_refused_before_it_is_called(tmp_path, name):
    path = tmp_path / "callables.py"
    path.write_text(CALLABLES)
    with pytest.raises(UserError, match=rf"callables.py:?\d*: '{name}' (must take \*\*columns|is <class)"):
        resolve(parse_reward_specs([f"{path}:{name}"]))
