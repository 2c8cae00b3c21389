"""Alarms: each is raised by a run with that failure, and none is raised by the default run with five seeds."""

import gzip
import json
import random
from pathlib import Path
from statistics import fmean
from typing import get_args

import pytest

from lora_grpo.config import AlarmName
from lora_grpo.monitoring.alarms import LONG_WINDOW, WINDOW, Alarms
from lora_grpo.monitoring.step_metrics import LOGPROB_MISMATCH, TEACHER_KL

FULL = 4.0
RECORDED = Path(__file__).parent / "default_runs.jsonl.gz"
"""The monitored metrics of the default run with seeds 0 to 4, written by record_default_runs.py."""


def fine(number, **changes):
    """Return a step of a run that learns, with realistic noise."""
    noise = random.Random(number)
    return {
        "loss": noise.gauss(0, 0.1),
        "grad_norm": 0.1,
        "reward": min(FULL, 2 + 0.03 * number) + noise.gauss(0, 0.1),
        "frac_reward_zero_std": noise.choice([0.0, 0.125, 0.25]),
        "entropy": 0.2 * 0.98**number,
        "completions/clipped_ratio": 0.02,
        LOGPROB_MISMATCH: 1e-6,
        **changes,
    }


def alarms(*steps, health=None):
    """Return the alarms of these steps, the first of which is step 1."""
    health = health or Alarms(FULL, max_mismatch=1e-4, sft="lora-grpo train sft")
    alarms = []
    for number, step in enumerate(steps, start=1):
        alarms += health.step(number, step)
    return alarms


def raised(*steps, health=None):
    return [(alarm.name, alarm.step) for alarm in alarms(*steps, health=health)]


def run_with(**changes):
    """Return 60 steps with the same failure, from step 31 on."""
    fine_steps = [fine(number) for number in range(1, 31)]
    failing_steps = [fine(number, **changes) for number in range(31, 61)]
    return fine_steps + failing_steps


def with_teacher(kls, rewards):
    """Return 60 steps with a teacher. Each pair is the mean until step 30, and after it."""
    steps = []
    for number in range(1, 61):
        is_late = number > 30
        noise = random.Random(number)
        kl = kls[is_late] + noise.gauss(0, 0.01)
        steps.append(fine(number, reward=rewards[is_late] + noise.gauss(0, 0.02), **{TEACHER_KL: kl}))
    return steps


FAILURES = {
    "nan": run_with(loss=float("nan")),
    "logprob_mismatch": run_with(**{LOGPROB_MISMATCH: 2e-4}),
    "policy_ratio": run_with(**{"clip_ratio/region_mean": 0.1}),
    "collapse": run_with(reward=0.1),
    "zero_variance": run_with(frac_reward_zero_std=1.0),
    "entropy": run_with(reward=2.5, entropy=0.001),
    "truncated": run_with(**{"completions/clipped_ratio": 0.95}),
    "teacher_kl": with_teacher(kls=(0.2, 0.6), rewards=(2.0, 2.5)),
    "teacher_mistakes": with_teacher(kls=(0.6, 0.2), rewards=(2.5, 2.0)),
}
"""The steps of a run with each failure. Type checkers hold that no alarm has a name that is not an AlarmName."""


def test_every_alarm_that_settings_can_name_is_raised():
    names = {*FAILURES, "hacking"}  # a validation pass raises hacking: below
    page = (Path(__file__).parents[2] / "docs" / "while-it-trains.md").read_text(encoding="utf-8")
    assert names == {*get_args(AlarmName)}
    assert [name for name in names if f"\n| `{name}` |" not in page] == []
    for name, steps in FAILURES.items():
        health = Alarms(FULL, max_mismatch=1e-4, checks_ratio=True)
        assert [alarm.name for alarm in alarms(*steps, health=health)] == [name]


@pytest.mark.parametrize("name", ["loss", "reward", "kl", "entropy"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_raises_an_alarm_at_once(name, value):
    (alarm,) = alarms(fine(1), fine(2, **{name: value}))
    assert (alarm.name, alarm.step) == ("nan", 2)
    assert name in alarm.message


def test_in_float16_a_gradient_may_overflow_twice():
    def overflowing(number):
        return fine(number, grad_norm=float("inf"))

    assert raised(fine(1), overflowing(2)) == [("nan", 2)]
    health = Alarms(FULL, float16=True)
    assert raised(fine(1), overflowing(2), overflowing(3), fine(4), health=health) == []
    assert raised(overflowing(5), overflowing(6), overflowing(7), health=health) == [("nan", 3)]


def test_a_sampler_that_differs_from_the_trainer_raises_an_alarm():
    (alarm,) = alarms(fine(1), fine(2, **{LOGPROB_MISMATCH: 2e-4}))
    assert (alarm.name, alarm.step) == ("logprob_mismatch", 2)
    assert "expected at most 0.0001" in alarm.message
    assert raised(fine(1, **{LOGPROB_MISMATCH: 2e-4}), health=Alarms(FULL, max_mismatch=None)) == []


CLIPPED_STEPS = {
    # The fraction of clipped tokens, whether the ratio is checked, whether rollouts are used again, and the alarms.
    "wrong logprobs": (0.1, True, False, ["policy_ratio"]),
    "rounding": (0.01, True, False, []),
    "the policy was updated on these rollouts before": (0.1, True, True, []),
    "PEFT, dropout or a narrow clipping range": (0.1, False, False, []),
}


@pytest.mark.parametrize(("clipped", "checks_ratio", "reused", "names"), CLIPPED_STEPS.values(), ids=CLIPPED_STEPS)
def test_tokens_clipped_before_the_first_update_raise_an_alarm(clipped, checks_ratio, reused, names):
    step = fine(1, **{"clip_ratio/region_mean": clipped})
    if reused:
        del step["reward"]
    raised_alarms = alarms(step, health=Alarms(FULL, checks_ratio=checks_ratio))
    assert [alarm.name for alarm in raised_alarms] == names
    assert all("--model.engine peft" in alarm.message for alarm in raised_alarms)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_reward_that_falls_by_half_is_a_collapse(scale):
    def reward(number, mean):
        return scale * (mean + random.Random(number).gauss(0, 0.2))

    steps = [fine(number, reward=reward(number, mean=3)) for number in range(1, 31)]
    steps += [fine(number, reward=reward(number, mean=1)) for number in range(31, 55)]
    ((name, step),) = raised(*steps, health=Alarms(scale * FULL))
    assert name == "collapse"
    assert 30 + LONG_WINDOW / 2 <= step <= 30 + LONG_WINDOW


@pytest.mark.parametrize(("validates_as_it_trains", "names"), [(True, ["collapse"]), (False, [])])
def test_a_reward_that_falls_at_once_is_a_collapse_of_the_base_on_such_rows(validates_as_it_trains, names):
    health = Alarms(FULL, validates_as_it_trains=validates_as_it_trains)
    rewards_of_base = [random.Random(number).choice([0.0, FULL]) for number in range(64)]
    assert health.validation(0, rewards_of_base, {}) == []
    steps = [fine(number, reward=0.0, frac_reward_zero_std=0.0) for number in range(1, 30)]
    assert raised(*steps, health=health) == [(name, LONG_WINDOW) for name in names]


NOISY_RUNS = {
    # Prompts of a step, the parameters of the beta distribution of their difficulties, and steps.
    "hard problems": (8, (0.2, 2), 600),
    "harder problems": (8, (0.05, 1.6), 300),
    "one prompt": (1, (0.5, 0.8), 300),
}


@pytest.mark.parametrize(("num_prompts", "shape", "num_steps"), NOISY_RUNS.values(), ids=NOISY_RUNS)
def test_rewards_that_are_rare_or_noisy_are_no_collapse(num_prompts, shape, num_steps):
    """The policy never changes and the problems have many difficulties. None of 30 runs per kind raises an alarm."""

    def rewards_of_group(generator, num_samples):
        chance = generator.betavariate(*shape)
        return [float(generator.random() < chance) for _ in range(num_samples)]

    for seed in range(30):
        generator = random.Random(seed)
        health = Alarms(1.0)
        health.validation(0, [reward for _ in range(64) for reward in rewards_of_group(generator, 1)], {})
        for number in range(1, num_steps + 1):
            rewards = [reward for _ in range(num_prompts) for reward in rewards_of_group(generator, 8)]
            assert not health.step(number, {"reward": fmean(rewards)}), seed


def test_groups_without_variance_raise_an_alarm_with_a_fix():
    def alarm_of_run(**changes):
        (alarm,) = alarms(*(fine(number, **changes) for number in range(1, 30)))
        assert (alarm.name, alarm.step) == ("zero_variance", WINDOW)
        return alarm

    hard = alarm_of_run(reward=0.1, frac_reward_zero_std=0.875)
    assert "--data.filter-by-difficulty" in hard.message
    learned = alarm_of_run(reward=3.9, frac_reward_zero_std=0.9)
    assert "the rows are learned" in learned.message
    never_solved = alarm_of_run(reward=0.0, frac_reward_zero_std=1.0)
    assert "lora-grpo train sft" in never_solved.message
    assert "--data.filter-by-difficulty" not in never_solved.message


def test_an_alarm_is_raised_once():
    steps = [fine(number, **{"completions/clipped_ratio": 0.95}) for number in range(1, 31)]
    steps += [fine(number) for number in range(31, 61)]
    steps += [fine(number, **{"completions/clipped_ratio": 0.95}) for number in range(61, 91)]
    assert raised(*steps) == [("truncated", WINDOW)]


def test_low_entropy_raises_an_alarm_unless_the_answers_are_right():
    def steps_that_lose_entropy(reward):
        steps = [fine(number, reward=reward, entropy=0.2) for number in range(1, 21)]
        return steps + [fine(number, reward=reward, entropy=0.002) for number in range(21, 50)]

    ((name, step),) = raised(*steps_that_lose_entropy(reward=2.0))
    assert name == "entropy"
    assert 20 < step <= 20 + WINDOW
    assert raised(*steps_that_lose_entropy(reward=3.9)) == []


def validate(health, step, reward, num_passed):
    """Run a validation pass over 64 rows."""
    passed = {f"row {number}": number < num_passed for number in range(64)}
    return health.validation(step, [reward] * 64, passed)


def test_reward_up_and_right_answers_down_is_hacking():
    health = Alarms(FULL)
    assert validate(health, step=0, reward=1.0, num_passed=40) == []
    assert validate(health, step=20, reward=1.5, num_passed=38) == []
    assert not health.hacked

    (alarm,) = validate(health, step=40, reward=2.0, num_passed=20)
    assert alarm.name == "hacking"
    assert "from 40 to 20 of 64" in alarm.message
    assert "since step 0" in alarm.message
    assert health.hacked

    assert validate(health, step=60, reward=2.5, num_passed=45) == []
    assert not health.hacked


def test_answers_and_reward_that_fall_together_are_no_hacking():
    health = Alarms(FULL)
    assert validate(health, step=0, reward=2.0, num_passed=40) == []
    assert validate(health, step=20, reward=1.0, num_passed=10) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_default_run_is_left_alone(seed):
    recorded = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()]
    of_run = [line for line in recorded if line["seed"] == seed]
    validations = [line for line in of_run if "passed" in line]
    steps = [line for line in of_run if "passed" not in line]

    health = Alarms(FULL, max_mismatch=1e-4)
    for line in of_run:
        if "passed" in line:
            assert health.validation(line["step"], line["rewards"], line["passed"]) == []
        else:
            assert health.step(line["step"], line) == []

    # The recording contains the metrics that every alarm checks, so a false alarm would be noticed.
    assert len(validations) == 4
    assert len(steps) == 60
    assert all(fine(1).keys() <= step.keys() for step in steps)


def test_a_rising_kl_is_an_alarm_where_no_reward_can_grade():
    steps = [{name: value for name, value in step.items() if name != "reward"} for step in FAILURES["teacher_kl"]]
    assert [name for name, _ in raised(*steps, health=Alarms(FULL, has_teacher=True))] == ["teacher_kl"]


@pytest.mark.parametrize(
    ("kls", "rewards"),
    [
        ((0.6, 0.2), (2.0, 2.5)),  # learns from the teacher
        ((0.6, 0.6), (2.5, 2.0)),  # the reward falls, and not because of the teacher
        ((0.2, 0.3), (2.0, 2.5)),  # rewards move the model a little away from the teacher
        ((0.001, 0.04), (2.0, 2.5)),  # hardly differs from the teacher
    ],
)
def test_a_teacher_that_does_no_harm_raises_no_alarm(kls, rewards):
    assert raised(*with_teacher(kls, rewards), health=Alarms(FULL, has_teacher=True)) == []


@pytest.mark.parametrize("learns_from_rewards", [False, True])
def test_rewards_without_a_weight_do_not_move_a_model_away_from_its_teacher(learns_from_rewards):
    health = Alarms(FULL, has_teacher=True, learns_from_rewards=learns_from_rewards)
    alarms = [alarm for number, step in enumerate(FAILURES["teacher_kl"], 1) for alarm in health.step(number, step)]
    [message] = [alarm.message for alarm in alarms if alarm.name == "teacher_kl"]
    assert "--train.learning-rate" in message
    assert ("--teacher.reward-weight" in message) == learns_from_rewards


def test_equal_rewards_are_no_problem_with_a_teacher():
    steps = FAILURES["zero_variance"]
    assert raised(*steps, health=Alarms(FULL)) != []
    assert raised(*steps, health=Alarms(FULL, has_teacher=True)) == []
