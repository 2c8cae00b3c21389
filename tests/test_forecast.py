"""The forecast of a run, against runs that are simulated here and against its own limits."""

import math

import numpy as np
import pytest
from helpers.report_runs import completion, write_run

from lora_grpo import forecast
from lora_grpo.config import RunConfig, endless_steps, replace
from lora_grpo.forecast import Sample, make_forecast, no_forecast
from lora_grpo.planning.preview import mean_learning_rate
from lora_grpo.planning.preview_groups import Answer, Group
from lora_grpo.planning.preview_page import show
from lora_grpo.report import write_report
from lora_grpo.tasks.registry import Verdict

SIZE, PROMPTS, RATE = 8, 8, 5e-4


def sampled(rng, rates, truncated=0.0):
    """A group for each pass rate; the reward is 2 for a right completion."""
    groups = []
    for rate in rates:
        right = rng.random(SIZE) < rate
        groups.append([Sample(bool(each), 2.0 * each, bool(rng.random() < truncated)) for each in right])
    return groups


def test_intervals_hold_nine_of_ten_outcomes_of_runs_that_learn_as_the_formula_says():
    rng, held = np.random.default_rng(0), np.zeros(3)
    runs = 200
    for _ in range(runs):
        population = rng.beta(1.5, 2.0, 2000)
        steps = int(rng.integers(5, 60))
        speed = forecast.SPEED * math.exp(forecast.SPREAD * rng.standard_normal())
        found = make_forecast(sampled(rng, rng.choice(population, 8)), RATE, steps, PROMPTS)

        def after(step, population=population, speed=speed):
            return 1 / (1 + np.exp(-np.log(population / (1 - population)) - speed * RATE * step))

        taught, rewards = [], []
        for step in range(steps):
            right = rng.binomial(SIZE, rng.choice(after(step), PROMPTS))
            taught.append(np.mean((right > 0) & (right < SIZE)))
            rewards.append(2 * right.mean() / SIZE)
        outcomes = np.mean(taught), np.mean(rewards[-5:]), after(steps).mean()
        ranges = found.teaching, found.reward, found.pass_rate
        held += [each.low <= outcome <= each.high for each, outcome in zip(ranges, outcomes, strict=True)]
    assert (held / runs >= 0.84).all() and (held / runs <= 0.985).all(), held / runs


def test_more_steps_or_a_higher_rate_promise_more_and_truncated_completions_limit_it():
    rng = np.random.default_rng(1)
    groups = sampled(rng, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.3])
    few, many = (make_forecast(groups, RATE, steps, PROMPTS) for steps in (5, 50))
    assert few.pass_rate.value < many.pass_rate.value and few.reward.value < many.reward.value
    assert many.teaching.value < few.teaching.value  # nearly all is right at the end
    assert make_forecast(groups, 10 * RATE, 5, PROMPTS).pass_rate == many.pass_rate
    cut = [
        [Sample(each.passed, each.reward, i % 2 == 0 and not each.passed) for i, each in enumerate(g)] for g in groups
    ]
    truncated = np.mean([each.truncated for group in cut for each in group])
    assert make_forecast(cut, RATE, 500, PROMPTS).pass_rate.value == pytest.approx(1 - truncated, abs=0.04)
    assert make_forecast(groups, RATE, 500, PROMPTS).pass_rate.value > 0.95


def test_the_reward_of_few_prompts_is_less_certain():
    groups = sampled(np.random.default_rng(3), [0.05, 0.9] * 4)
    few, many = (make_forecast(groups, 1e-6, 5, prompts).reward for prompts in (1, 100))
    assert few.high - few.low > 1.2 * (many.high - many.low)


def test_the_same_groups_give_the_same_forecast():
    groups = sampled(np.random.default_rng(2), [0.3] * 8)
    assert make_forecast(groups, RATE, 20, PROMPTS) == make_forecast(groups, RATE, 20, PROMPTS)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_equal_rewards_give_no_forecast(rate):
    assert make_forecast(sampled(np.random.default_rng(0), [rate] * 4), RATE, 20, PROMPTS) is None


def test_a_group_without_a_right_completion_still_has_a_chance():
    groups = [[Sample(False, reward, False) for reward in (0.0, 0.5, 0.5, 0.0)]] * 4
    found = make_forecast(groups, RATE, 60, PROMPTS)
    assert 0 < found.pass_rate.value < found.pass_rate.high <= 1
    assert 0 <= found.reward.low <= found.reward.high <= 0.5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"model": {"name": "Qwen/Qwen2.5-0.5B-Instruct"}}, "Qwen/Qwen2.5-0.5B-Instruct"),
        ({"control": "random"}, "control"),
        ({"method": "sft"}, "GRPO"),
        ({"lora": {"rank": 4}}, "lora"),
        ({"grpo": ("num_iterations=2",)}, "grpo"),
        ({"train": {"beta": 0.1}}, "train.beta"),
        ({"train": {"optimizer": "sgd"}}, "train.optimizer"),
        ({"sampling": {"temperature": 1.2}}, "sampling.temperature"),
        ({"data": {"filter_by_difficulty": True}}, "--data.filter-by-difficulty"),
    ],
)
def test_there_is_a_forecast_only_for_what_was_measured(changes, named):
    reason = no_forecast(replace(RunConfig(), changes).to_dict())
    assert reason is None if named is None else named in reason


# In the preview and in the report


def preview_of(config, capsys, passed=(True, False, True, False)):
    answers = tuple(
        Answer("text", 9, False, {"correct_answer": float(each)}, Verdict(each, "correct" if each else "wrong_answer"))
        for each in passed
    )
    show(config, [Group({"id": "a", "question": "q"}, answers)] * 4, 1e-3)
    return capsys.readouterr().out


def test_the_preview_says_what_to_expect_or_why_nothing(capsys):
    out = preview_of(replace(RunConfig(), {"train": {"max_steps": 37}}), capsys)
    assert "37 steps" in out and "\npass@1    50% -> " in out and "\nreward    0.50 -> " in out
    other = preview_of(replace(RunConfig(), {"model": {"name": "other"}}), capsys)
    assert "pass@1" not in other and "\nforecast  none: " in other
    assert "\nforecast  none: " in preview_of(RunConfig(), capsys, passed=(True,) * 4)
    config = replace(RunConfig(), {"hours": 0.5, "train": {"max_steps": endless_steps(0.5)}})
    assert "--train.max-steps" in preview_of(config, capsys)
    length = replace(RunConfig(), {"rewards": ("near_length:20",)})
    answer = Answer("text", 9, False, {"near_length": 0.5}, Verdict(True, "correct"))
    show(
        length,
        [Group({"id": "a", "question": "q"}, (answer, Answer("b", 9, False, {"near_length": 0.1}, answer.verdict)))],
        1e-3,
    )
    out = capsys.readouterr().out
    assert "reward    " in out and "pass@1" not in out


@pytest.mark.parametrize(("scheduler", "share"), [("constant", 1.0), ("constant_with_warmup", 0.95), ("linear", 0.5)])
def test_the_learning_rate_is_its_mean_over_the_schedule(scheduler, share):
    settings = {"max_steps": 100, "warmup_steps": 10, "lr_scheduler": scheduler, "learning_rate": 1e-3}
    assert mean_learning_rate(replace(RunConfig(), {"train": settings})) == pytest.approx(share * 1e-3, rel=0.02)


def test_the_report_shows_the_forecast_beside_the_outcome(tmp_path):
    size = RunConfig().sampling.num_generations
    first = [completion(1, "a", 2.0 * (i % 2), passed=bool(i % 2), truncated=False) for i in range(4 * size)]
    run = write_run(tmp_path / "mine", completions=first, every=True)
    page, markdown = write_report(run).read_text(), (run / "report/report.md").read_text()
    for text in (page, markdown):
        assert (
            "Forecast and outcome" in text
            and "groups with different rewards" in text
            and "reward, last 3 steps" in text
        )
    assert "38%" in markdown[markdown.index("Forecast and outcome") :].partition("##")[0]  # pass@1 of the trained model
    assert (
        "Forecast" not in write_report(write_run(tmp_path / "running", completions=first, evaluated=False)).read_text()
    )
    config = replace(RunConfig(output_dir=str(tmp_path / "other")), {"model": {"name": "other"}})
    assert "Forecast" not in write_report(write_run(tmp_path / "other", completions=first, config=config)).read_text()
