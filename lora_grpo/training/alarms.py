"""Watches a run by its metrics: what goes wrong while a GPU is paid for, and what to do about it.

| watch           | fires where                                                                                        |
|-----------------|----------------------------------------------------------------------------------------------------|
| `nan`           | loss, reward, KL, entropy or the gradient's norm is no number                                      |
| `drift`         | sampler and trainer are further apart than rounding explains                                       |
| `collapse`      | the reward of 20 steps is below half of the best 20, or the base's, by more than 6 standard errors |
| `zero_variance` | in more than 4 of 5 groups all completions earn the same                                           |
| `entropy`       | below a twentieth of what it was at the start, while a tenth of the full marks is still missing    |
| `truncated`     | more than 9 of 10 completions hit their length limit                                               |
| `hacking`       | held-out rows earn more than before, and fewer of their answers are right (p < 0.01)               |

`zero_variance`, `entropy` and `truncated` look at the mean of the last `WINDOW` steps. Each watch fires once, and again
only when it found nothing for as many steps, `hacking` in one pass.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.evaluation import mcnemar_exact
from lora_grpo.training.step_metrics import LOGPROB_MISMATCH

WATCHES = ("nan", "logprob_mismatch", "collapse", "zero_variance", "entropy", "truncated", "hacking")
WINDOW = 10
"""Steps whose mean is looked at."""
LONG_WINDOW = 20
"""The same for a reward, which is noisier."""
_STANDARD_ERRORS = 6.0
"""Of a best that was chosen from many, step after step: with fewer, sparse rewards raise false alarms."""
_MOSTLY_EQUAL, _MOSTLY_TRUNCATED = 0.8, 0.9
_ENTROPY_LEFT = 0.05
_NEARLY_FULL = 0.9
"""Share of the full marks above which a model that is certain is simply right."""
_HACKED_P = 0.01


@dataclass(frozen=True)
class Alarm:
    """One watch that fired."""

    step: int
    name: str
    message: str
    """What was seen, and what to change."""


@dataclass
class Alarms:
    """The state of all watches of a run.

    Args:
        max_reward: the most that a completion can earn: the sum of the positive scales of the rewards.
        allowed_drift: mean absolute difference of log-probabilities in nats a token; None where they do not compare.
        float16: training scales the loss, and finds its scale by gradients that overflow in a step or two.
    """

    max_reward: float
    allowed_drift: float | None = None
    float16: bool = False
    _steps: list[Mapping[str, float]] = field(default_factory=list)
    _best: tuple[float, float] | None = None
    """Mean reward of the base, or of the best `LONG_WINDOW` steps before as many others, and its squared error."""
    hacked: bool = False
    """Whether the last held-out pass earned more with fewer right answers."""
    _passes: list[tuple[int, float, Mapping[str, bool]]] = field(default_factory=list)
    _overflows: int = 0
    """Steps on end whose gradient's norm was no number."""
    _quiet: dict[str, int] = field(default_factory=dict)
    """For each watch that fired, how many looks have found nothing since."""

    def step(self, number: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Look at one step's metrics and return what is wrong with it.

        Args:
            number: of the step.
            metrics: TRL's, as in metrics.jsonl. Steps that use the same rollouts again have no `reward`.
        """
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        self._steps.append({**numbers, "step": number})
        found = {"nan": self._not_a_number(), "logprob_mismatch": self._drift()}
        self._steps[-1] = {name: value for name, value in self._steps[-1].items() if math.isfinite(value)}
        rewarded = [step for step in self._steps if "reward" in step]
        if "reward" in self._steps[-1] and len(rewarded) >= WINDOW:
            found |= {
                "collapse": self._collapse([step["reward"] for step in rewarded]),
                "zero_variance": self._zero_variance(rewarded[-WINDOW:]),
                "entropy": self._entropy(rewarded),
                "truncated": _truncated(rewarded[-WINDOW:]),
            }
        return self._new(number, found)

    def validation(self, number: int, rewards: Sequence[float], passed: Mapping[str, bool]) -> list[Alarm]:
        """Look at the held-out rows after a step, and return whether right answers are being sold for reward.

        Args:
            number: of the step; 0 is before the first.
            rewards: what each row's completion earned.
            passed: whether it is right, by the row's id; every time the same rows with the same random numbers. Empty
                where nothing is right or wrong.
        """
        if not number and len(rewards) > 1:
            self._best = (statistics.fmean(rewards), statistics.variance(rewards) / len(rewards))
        self._passes.append((number, statistics.fmean(rewards), passed))
        message = self._hacking(rewards, passed) if passed else None
        self.hacked = message is not None
        return self._new(number, {"hacking": message})

    def _new(self, number: int, found: Mapping[str, str | None]) -> list[Alarm]:
        """Return the alarms that were not given already."""
        alarms = []
        for watch, message in found.items():
            if message is None:
                if watch in self._quiet:
                    self._quiet[watch] += 1
                continue
            if self._quiet.get(watch, WINDOW) >= (1 if watch == "hacking" else WINDOW):
                alarms.append(Alarm(number, watch, message))
            self._quiet[watch] = 0
        return alarms

    def _not_a_number(self) -> str | None:
        last = self._steps[-1]
        names = [name for name in ("loss", "reward", "kl", "entropy") if not math.isfinite(last.get(name, 0.0))]
        self._overflows = 0 if math.isfinite(last.get("grad_norm", 0.0)) else self._overflows + 1
        if self._overflows >= (3 if self.float16 else 1):
            names.append("grad_norm")
        if not names:
            return None
        return (
            f"{' and '.join(names)} is no number: the adapter is, or soon will be, spoiled; lower "
            "--train.learning-rate or --train.max-grad-norm, and look at rewards of your own for divisions by zero"
        )

    def _drift(self) -> str | None:
        apart = self._steps[-1].get(LOGPROB_MISMATCH)
        if apart is None or self.allowed_drift is None or apart <= self.allowed_drift:
            return None
        return (
            f"the log-probabilities of sampler and trainer are {apart:.2g} nats a token apart, expected at most "
            f"{self.allowed_drift:g}: the rollouts come from another policy than the one that is trained; go on with "
            "--resume, and if it happens again begin anew with --sampling.backend transformers"
        )

    def _collapse(self, rewards: Sequence[float]) -> str | None:
        """Compare the last `LONG_WINDOW` steps with the best that came before them."""
        if len(rewards) < LONG_WINDOW:
            return None
        # From one step to the next little is learned: what differs there is noise, and all steps tell of it.
        noise = statistics.fmean((after - before) ** 2 for before, after in itertools.pairwise(rewards)) / 2
        before, now = rewards[-2 * LONG_WINDOW : -LONG_WINDOW], rewards[-LONG_WINDOW:]
        if len(before) == LONG_WINDOW and (self._best is None or statistics.fmean(before) > self._best[0]):
            self._best = (statistics.fmean(before), noise / LONG_WINDOW)
        if self._best is None:
            return None
        (then, then_error), last = self._best, statistics.fmean(now)
        error = math.sqrt(max(then_error, noise / LONG_WINDOW) + noise / LONG_WINDOW)
        # Rewards may be negative: half of the way is then counted from where the run began.
        floor = min(0.0, statistics.fmean(rewards[:LONG_WINDOW]))
        if then - last <= _STANDARD_ERRORS * error or last - floor >= (then - floor) / 2:
            return None
        return (
            f"the reward of the last {LONG_WINDOW} steps is {last:.2g}, after {then:.2g} at its best: the policy has "
            "collapsed; take best/, if it is there, or begin anew with a lower --train.learning-rate or a --train.beta "
            "above 0"
        )

    def _zero_variance(self, window: Sequence[Mapping[str, float]]) -> str | None:
        share = _mean(window, "frac_reward_zero_std")
        if share is None or share <= _MOSTLY_EQUAL:
            return None
        reward = statistics.fmean(step["reward"] for step in window)
        seen = f"in {share:.0%} of the last {WINDOW} steps' groups all completions earned the same: they teach nothing"
        if reward >= _NEARLY_FULL * self.max_reward:
            return (
                f"{seen}. Nearly all have full marks ({reward:.2f} of {self.max_reward:g}): the rows are learned; "
                "harder ones (--data.train) or the end of this run"
            )
        return (
            f"{seen}. Pass --data.filter-by-difficulty, a higher --sampling.temperature, a larger "
            "--sampling.num-generations or a reward with more than two values"
        )

    def _entropy(self, rewarded: Sequence[Mapping[str, float]]) -> str | None:
        start, last = _mean(rewarded[:WINDOW], "entropy"), _mean(rewarded[-WINDOW:], "entropy")
        if not start or last is None or last >= _ENTROPY_LEFT * start:
            return None
        reward = statistics.fmean(step["reward"] for step in rewarded[-WINDOW:])
        if reward >= _NEARLY_FULL * self.max_reward:
            return None
        return (
            f"the entropy fell from {start:.3g} to {last:.2g} nats a token at a reward of {reward:.2f} of "
            f"{self.max_reward:g}: the model no longer tries anything else; begin anew with a lower "
            "--train.learning-rate, --grpo epsilon_high=0.28, or a --train.beta above 0"
        )

    def _hacking(self, rewards: Sequence[float], passed: Mapping[str, bool]) -> str | None:
        """Compare this pass with the one that had most right answers, the first of several."""
        when, then, best = max(self._passes, key=lambda each: (sum(each[2].values()), -each[0]))
        before, after, now = [best[row] for row in passed], [*passed.values()], statistics.fmean(rewards)
        if now <= then or sum(after) >= sum(before) or mcnemar_exact(before, after) >= _HACKED_P:
            return None
        return (
            f"since step {when} the held-out rows earn more ({then:.2f}, now {now:.2f}) while fewer of their answers "
            f"are right ({sum(before)}, now {sum(after)} of {len(after)}): what is paid is not what is wanted. Read "
            "completions/, lower the scales of the rewards that are not the verdict, and begin anew; what best/ holds, "
            "if anything, is from before"
        )


def _truncated(window: Sequence[Mapping[str, float]]) -> str | None:
    share = _mean(window, "completions/clipped_ratio")
    if share is None or share <= _MOSTLY_TRUNCATED:
        return None
    return (
        f"{share:.0%} of the completions of the last {WINDOW} steps were cut off: answers at their ends are never "
        "seen; raise --sampling.max-completion-tokens, or ask for shorter answers"
    )


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return statistics.fmean(values) if values else None
