"""Forecasts what a run will reach, from groups that were sampled and graded before it.

    forecast = make_forecast(groups, learning_rate=5e-4, steps=60, prompts_per_step=8)
    forecast.pass_rate        # Range(value=0.91, low=0.74, high=0.97): pass@1 after the last step

The model: with every step, the log-odds of a right completion rise by SPEED x learning rate, on each problem. With pass
rate p of a problem before training, and the share t of truncated completions, which no step makes right,

    p(step) = (1 - t) sigmoid(logit(p / (1 - t)) + rise),    rise = SPEED x learning rate x step

- pass@1 after training: the mean of p over the problems.
- Reward after training: the same formula, for the place of the mean reward between the lowest and the highest reward of
  the sample.
- Share of groups that teach: that of the sample, times the change of 1 - sum of (p u)^G - sum of ((1 - p) w)^G, the
  probability that G completions do not all have the same reward, as a mean over problems and steps. u and w are the
  shares of the different rewards among the right and among the wrong completions of the sample.

The intervals should hold 90% of the outcomes. They are those of 2,000 simulated runs, each of which draws the problems
again (Bayesian bootstrap), the rates of each and the share that teaches (beta posteriors), the speed (log-normal), and
the noise of the steps that the outcome is measured on.

SPEED and its spread are a fit to 64 short runs of the bundled starter model; 32 others check the intervals
(docs/results.md#the-forecast). Other models learn at other speeds.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lora_grpo.config import STARTER, RunConfig

SPEED = 150.0
"""Rise of the log-odds for a learning rate of 1 in one step."""
SPREAD = 0.3
"""Standard deviation of the logarithm of the speed."""
LAST = 5
"""The reward after training is the mean of this many last steps."""
_SIMULATED = 2000
_INTERVALS = 12
"""The share of groups that teach is computed in the middle of this many parts of a run."""
_FIXED = ("lora", "grpo", "train.optimizer", "train.beta", "sampling.temperature", "sampling.top_p")
"""Settings of the measured runs that change the speed; the runs had the defaults."""
_EQUAL = 1e-6
"""Rewards that differ by less than this are equal, because sums of the same numbers can differ by rounding."""

Floats = NDArray[np.float64]


class Sample(NamedTuple):
    """One sampled completion."""

    passed: bool
    reward: float
    """Weighted sum of the rewards."""
    truncated: bool


class Range(NamedTuple):
    """A forecast: its median, and the interval that should hold the outcome with a probability of 90%."""

    value: float
    low: float
    high: float

    def text(self, unit: str = "") -> str:
        """Return the value with its interval; with the unit "%", as percentages."""
        value, low, high = (f"{100 * each:.0f}" if unit else f"{each:.2f}" for each in self)
        return f"{value}{unit} [{low}, {high}]"


@dataclass(frozen=True)
class Forecast:
    steps: int
    teaching: Range
    """Share of groups with unequal rewards, in all steps."""
    reward: Range
    """Mean reward of the last steps."""
    pass_rate: Range
    """pass@1 after the last step, on problems like those of the sample. An evaluation adds its own sampling error."""


def no_forecast(config: Mapping[str, Any]) -> str | None:
    """Return why there is no forecast for a run, given the configuration as in run.json; None if there can be one."""
    if config["method"] != "grpo":
        return "a forecast needs the rewards of GRPO"
    if config["model"]["name"] != STARTER:
        return f"how fast {config['model']['name']} learns was not measured, only for the bundled {STARTER} model"
    defaults = RunConfig().to_dict()
    for name in _FIXED:
        ours, measured = (functools.reduce(operator.getitem, name.split("."), each) for each in (config, defaults))
        if ours != measured:
            return f"how fast the {STARTER} model learns was measured only with the defaults of {name}"
    if config.get("control"):
        return "a control has other rewards than the run"
    if config["data"]["filter_by_difficulty"]:
        return "the sample has problems that --data.filter-by-difficulty leaves out of training"
    return None


def make_forecast(
    groups: Sequence[Sequence[Sample]], learning_rate: float, steps: int, prompts_per_step: int
) -> Forecast | None:
    """Forecast a run from groups of equal size that the base model answered.

    Args:
        groups: the graded completions of each prompt.
        learning_rate: mean over the steps.
        steps: optimizer steps of the run.
        prompts_per_step: prompts in a step, for the noise of the outcome.

    Returns:
        None if the rewards of no group differ, because the sample does not show what the model could learn.
    """
    rng = np.random.default_rng(0)
    passed = np.array([[each.passed for each in group] for group in groups], dtype=float)
    rewards = np.array([[each.reward for each in group] for group in groups], dtype=float)
    count, size = passed.shape
    unequal = int((np.ptp(rewards, axis=1) > _EQUAL).sum())
    if not unequal:
        return None
    truncated = np.array([[each.truncated for each in group] for group in groups], dtype=float)
    rise = learning_rate * SPEED * np.exp(SPREAD * rng.standard_normal((_SIMULATED, 1)))
    # Weights of 1 would make the variance of the mean (count - 1) / (count + 1) of what it is.
    weights = rng.dirichlet(np.full(count, max(0.25, 1 - 2 / count)), _SIMULATED)

    def mean_over_problems(values: Floats) -> Floats:
        return (weights * values).sum(1)

    most = 1 - mean_over_problems(_posterior(truncated, rng))[:, np.newaxis]
    pass_rates = _Rates(passed, most, rise, rng)
    of_right, of_wrong = (_shares(rewards[passed == each]) for each in (1, 0))

    def unequal_groups(step: float) -> Floats:
        rate = pass_rates.after(step)
        return 1 - mean_over_problems(rate**size * (of_right**size).sum() + (1 - rate) ** size * (of_wrong**size).sum())

    middles = (np.arange(_INTERVALS) + 0.5) * steps / _INTERVALS
    change = np.mean([unequal_groups(step) for step in middles], axis=0) / unequal_groups(0)
    teaching = np.clip(rng.beta(unequal + 0.5, count - unequal + 0.5, _SIMULATED) * change, 0, 1)
    num_groups = steps * prompts_per_step

    low, high = rewards.min(), rewards.max()
    place = (rewards - low) / (high - low)
    last = min(LAST, steps) * prompts_per_step
    noise = place.mean(1).std() / last**0.5 * rng.standard_normal(_SIMULATED)
    reward = np.clip(mean_over_problems(_Rates(place, most, rise, rng).after(steps)) + noise, 0, 1)
    return Forecast(
        steps,
        teaching=_range(rng.binomial(num_groups, teaching) / num_groups),
        reward=_range(low + (high - low) * reward),
        pass_rate=_range(mean_over_problems(pass_rates.after(steps))),
    )


class _Rates:
    """The rate of each problem in simulated runs, given values from 0 to 1 of shape (problems, completions)."""

    def __init__(self, values: Floats, most: Floats, rise: Floats, rng: np.random.Generator) -> None:
        rates = _posterior(values, rng)
        self.most = np.maximum(most, rates.mean(1, keepdims=True))  # a completion may be truncated after its answer
        rates = np.clip(rates, 1e-6, self.most - 1e-6)
        self.odds, self.rise = rates / (self.most - rates), rise

    def after(self, step: float) -> Floats:
        """Return the rates after a step, shape (simulated runs, problems)."""
        odds = self.odds * np.exp(self.rise * step)
        return self.most * odds / (1 + odds)


def _posterior(values: Floats, rng: np.random.Generator) -> Floats:
    """Draw the rate of each problem from its posterior; the prior is worth one completion at the mean of all."""
    mean = (values.sum() + 0.5) / (values.size + 1)
    sums = values.sum(1)
    return rng.beta(sums + mean, values.shape[1] - sums + 1 - mean, (_SIMULATED, len(values)))


def _shares(rewards: Floats) -> Floats:
    """Return the share of each different reward."""
    return np.unique(rewards, return_counts=True)[1] / max(1, len(rewards))


def _range(simulated: Floats) -> Range:
    low, value, high = np.quantile(simulated, (0.05, 0.5, 0.95))
    return Range(float(value), float(low), float(high))
