"""Alarms: each is raised by a run with that failure, and none is raised by the default run with five seeds."""

import gzip
import json
import random
from pathlib import Path
from typing import get_args

import pytest

from lora_grpo.config import AlarmName
from lora_grpo.monitoring.alarms import LONG_WINDOW, WINDOW, Alarms
from lora_grpo.monitoring.step_metrics import LOGPROB_MISMATCH as DRIFT

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
        DRIFT: 1e-6,
        **changes,
    }


def alarms(*steps, health=None):
    health = health or Alarms(FULL, max_mismatch=1e-4, sft="lora-grpo train sft")
    return [alarm for number, step in enumerate(steps, start=1) for alarm in health.step(number, step)]


def raised(*steps, **kwargs):
    return [(alarm.name, alarm.step) for alarm in alarms(*steps, **kwargs)]


def run_with(**changes):
    """Return 60 steps with the same failure, from step 31 on."""
    return [fine(number, **(changes if number > 30 else {})) for number in range(1, 61)]


FAILURES = {
    "nan": run_with(loss=float("nan")),
    "logprob_mismatch": run_with(**{DRIFT: 2e-4}),
    "policy_ratio": run_with(**{"clip_ratio/region_mean": 0.1}),
    "collapse": run_with(reward=0.1),
    "zero_variance": run_with(frac_reward_zero_std=1.0),
    "entropy": run_with(reward=2.5, entropy=0.001),
    "truncated": run_with(**{"completions/clipped_ratio": 0.95}),
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
    assert (alarm.name, alarm.step) == ("nan", 2) and name in alarm.message


def test_in_float16_a_gradient_may_overflow_twice():
    bad = {"grad_norm": float("inf")}
    half = {"health": Alarms(FULL, float16=True)}
    assert raised(fine(1), fine(2, **bad), fine(3, **bad), fine(4), **half) == []
    assert raised(fine(5, **bad), fine(6, **bad), fine(7, **bad), **half) == [("nan", 3)]
    assert raised(fine(1), fine(2, **bad)) == [("nan", 2)]


def test_a_sampler_that_differs_from_the_trainer_raises_an_alarm():
    (alarm,) = alarms(fine(1), fine(2, **{DRIFT: 2e-4}))
    assert (alarm.name, alarm.step) == ("logprob_mismatch", 2) and "expected at most 0.0001" in alarm.message
    assert raised(fine(1, **{DRIFT: 2e-4}), health=Alarms(FULL, max_mismatch=None)) == []


@pytest.mark.parametrize(
    ("clipped", "checks", "reused", "names"),
    [
        (0.1, True, False, ["policy_ratio"]),
        (0.01, True, False, []),  # rounding
        (0.1, True, True, []),  # the policy was updated on these rollouts before
        (0.1, False, False, []),  # PEFT, dropout, a narrow clipping range
    ],
)
def test_tokens_clipped_before_the_first_update_raise_an_alarm(clipped, checks, reused, names):
    step = fine(1, **{"clip_ratio/region_mean": clipped})
    if reused:
        del step["reward"]
    found = alarms(step, health=Alarms(FULL, checks_ratio=checks))
    assert [alarm.name for alarm in found] == names
    assert all("--model.engine peft" in alarm.message for alarm in found)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_reward_that_falls_by_half_is_a_collapse(scale):
    steps = [fine(number, reward=scale * (3 + random.Random(number).gauss(0, 0.2))) for number in range(1, 31)]
    steps += [fine(number, reward=scale * (1 + random.Random(number).gauss(0, 0.2))) for number in range(31, 55)]
    ((watch, step),) = raised(*steps, health=Alarms(scale * FULL))
    assert watch == "collapse" and 30 + LONG_WINDOW / 2 <= step <= 30 + LONG_WINDOW


def test_a_reward_that_falls_at_once_is_a_collapse_of_the_base():
    health = Alarms(FULL)
    assert health.validation(0, [random.Random(number).choice([0.0, FULL]) for number in range(64)], {}) == []
    ((watch, step),) = raised(
        *(fine(number, reward=0.0, frac_reward_zero_std=0.0) for number in range(1, 30)), health=health
    )
    assert (watch, step) == ("collapse", LONG_WINDOW)


@pytest.mark.parametrize(
    ("prompts", "shape", "steps"), [(8, (0.2, 2), 600), (8, (0.05, 1.6), 300), (1, (0.5, 0.8), 300)]
)
def test_rewards_that_are_rare_or_noisy_are_no_collapse(prompts, shape, steps):
    """The policy never changes and the problems have many difficulties. None of 30 runs per kind raises an alarm."""
    for seed in range(30):
        draw, health = random.Random(seed), Alarms(1.0)

        def mean_reward(draw=draw):
            chances = [draw.betavariate(*shape) for _ in range(prompts)]
            return sum(draw.random() < chance for chance in chances for _ in range(8)) / (8 * prompts)

        health.validation(0, [float(draw.random() < draw.betavariate(*shape)) for _ in range(64)], {})
        assert not any(health.step(number, {"reward": mean_reward()}) for number in range(1, steps + 1)), seed


def test_groups_without_variance_raise_an_alarm_with_a_fix():
    (alarm,) = alarms(*(fine(number, reward=0.1, frac_reward_zero_std=0.875) for number in range(1, 30)))
    assert (alarm.name, alarm.step) == ("zero_variance", WINDOW) and "--data.filter-by-difficulty" in alarm.message
    (learned,) = alarms(*(fine(number, reward=3.9, frac_reward_zero_std=0.9) for number in range(1, 30)))
    assert learned.name == "zero_variance" and "the rows are learned" in learned.message
    (wrong,) = alarms(*(fine(number, reward=0.0, frac_reward_zero_std=1.0) for number in range(1, 30)))
    assert "lora-grpo train sft" in wrong.message and "--data.filter-by-difficulty" not in wrong.message


def test_an_alarm_is_raised_once():
    cut = {"completions/clipped_ratio": 0.95}
    steps = [fine(number, **({} if 30 < number <= 60 else cut)) for number in range(1, 91)]
    assert raised(*steps) == [("truncated", 10)]


def test_low_entropy_raises_an_alarm_unless_the_answers_are_right():
    gone = [fine(number, reward=2.0, entropy=0.2 if number <= 20 else 0.002) for number in range(1, 50)]
    ((watch, step),) = raised(*gone)
    assert watch == "entropy" and 20 < step <= 20 + WINDOW
    right = [fine(number, reward=3.9, entropy=0.2 if number <= 20 else 0.002) for number in range(1, 50)]
    assert raised(*right) == []


def validate(health, number, reward, right):
    """Run a validation pass over 64 rows."""
    return health.validation(number, [reward] * 64, {f"row {place}": place < right for place in range(64)})


def test_reward_up_and_right_answers_down_is_hacking():
    health = Alarms(FULL)
    assert validate(health, 0, 1.0, 40) == [] and validate(health, 20, 1.5, 38) == []
    assert not health.hacked
    (alarm,) = validate(health, 40, 2.0, 20)
    assert alarm.name == "hacking" and "from 40 to 20 of 64" in alarm.message and "since step 0" in alarm.message
    assert health.hacked
    assert validate(health, 60, 2.5, 45) == [] and not health.hacked


def test_answers_and_reward_that_fall_together_are_no_hacking():
    health = Alarms(FULL)
    assert validate(health, 0, 2.0, 40) == [] and validate(health, 20, 1.0, 10) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_default_run_is_left_alone(seed):
    lines = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()]
    health, found = Alarms(FULL, max_mismatch=1e-4), []
    mine = [line for line in lines if line["seed"] == seed]
    for line in mine:
        if "passed" in line:
            found += health.validation(line["step"], line["rewards"], line["passed"])
        else:
            found += health.step(line["step"], line)
    assert found == []
    # The recording contains the metrics that every alarm checks, so a false alarm would be noticed.
    assert sum("passed" in line for line in mine) == 4 and sum("loss" in line for line in mine) == 60
    needed = {"loss", "grad_norm", "reward", "frac_reward_zero_std", "entropy", "completions/clipped_ratio", DRIFT}
    assert all(needed <= line.keys() for line in mine if "loss" in line)
