"""Alarms: detect from the metrics that a run goes wrong, and suggest changes.

docs/while-it-trains.md describes each alarm. An alarm is raised at most once in a run.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.evaluation import mcnemar_exact
from lora_grpo.training.completions import LOGPROB_MISMATCH

WINDOW = 10
"""Number of steps to average over."""
LONG_WINDOW = 20
"""Number of steps to average the reward over, which is noisier."""
_STANDARD_ERRORS = 6.0
"""The best of many windows overestimates the true mean. A lower threshold causes false alarms on sparse rewards."""
_MAX_ZERO_VARIANCE, _MAX_TRUNCATED = 0.8, 0.9
_MIN_ENTROPY = 0.05
"""Fraction of the initial entropy."""
_NEAR_MAXIMUM = 0.9
"""Fraction of the maximum reward above which low entropy and equal rewards mean success."""
_HACKING_P = 0.01
_CLIP_RATIO = "clip_ratio/region_mean"
_MAX_CLIPPED = 0.02
"""Largest accepted fraction of clipped tokens before the first update.

With vLLM, the ratio compares the pass with gradients and the pass without. Both have the same policy, so only rounding
clips tokens. By the comments of unsloth_zoo 2026.10.7, rounding in 16 bits changes the logprob of a batch's worst token
by about 0.25 nats; clipping starts at 0.18 (epsilon 0.2). Completions that attend to each other change some by 2.4 or
more: 10% were clipped in tests/gpu_rig. Smaller errors are not noticed, nor is any without vLLM, where the ratio is 1
by construction. The importance sampling correction is not a part of the ratio."""

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Alarm:
    """The problem, and the suggested change."""

    step: int
    name: str
    message: str


@dataclass
class Alarms:
    """The state of all alarms of a run."""

    max_reward: float
    """The highest possible reward of a completion: the sum of the positive weights."""
    max_mismatch: float | None = None
    """Largest accepted logprob mismatch, in nats per token. None if the logprobs are not comparable."""
    sft: str | None = None
    """The command that trains on reference answers first, if there is one."""
    float16: bool = False
    """Whether training uses loss scaling, so that gradients may overflow for one or two steps."""
    checks_ratio: bool = False
    """Whether only rounding can clip the first use of rollouts. See `_MAX_CLIPPED`."""
    hacked: bool = False
    """Whether the last validation pass had a higher reward but fewer correct answers."""
    _steps: list[Metrics] = field(default_factory=list)
    _best: tuple[float, float] | None = None
    """Mean reward of the best earlier `LONG_WINDOW` steps (or of the base), and its squared standard error."""
    _passes: list[tuple[int, float, Mapping[str, bool]]] = field(default_factory=list)
    """Step, mean reward and verdicts of each validation pass."""
    _overflows: int = 0
    """Consecutive steps with a non-finite gradient norm."""
    _raised: set[str] = field(default_factory=set)

    def step(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Return the alarms that one step's metrics, as in metrics.jsonl, raise."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        messages = self._broken(numbers)
        self._steps.append({name: value for name, value in numbers.items() if math.isfinite(value)})
        rewarded = [each for each in self._steps if "reward" in each]  # steps that reuse rollouts have none
        if "reward" in self._steps[-1] and len(rewarded) >= WINDOW:
            messages |= self._signal(rewarded[-WINDOW:], _mean(rewarded[:WINDOW], "entropy"))
            messages["collapse"] = self._collapse([each["reward"] for each in rewarded])
        return self._new(step, messages)

    def validation(self, step: int, rewards: Sequence[float], passed: Mapping[str, bool]) -> list[Alarm]:
        """Return the alarms that a validation pass raises. Step 0 is the base.

        `passed` maps each row id to whether its completion is correct.
        """
        reward, after = statistics.fmean(rewards), sum(passed.values())
        if not step and len(rewards) > 1:
            self._best = (reward, statistics.variance(rewards) / len(rewards))
        self._passes.append((step, reward, passed))
        # Compare with the pass that had the most correct answers (the earliest, if tied).
        since, before_reward, best = max(self._passes, key=lambda each: (sum(each[2].values()), -each[0]))
        before = sum(best.values())
        message = None
        is_worse = after < before and mcnemar_exact([best[row] for row in passed], [*passed.values()]) < _HACKING_P
        if reward > before_reward and is_worse:
            message = (
                f"since step {since} validation reward rose from {before_reward:.2f} to {reward:.2f} while correct "
                f"answers fell from {before} to {after} of {len(passed)}: the policy exploits the rewards; read "
                "completions/, lower the weights of rewards other than the grader's, and start over; best/, if it "
                "exists, is from before"
            )
        self.hacked = message is not None
        return self._new(step, {"hacking": message})

    def _new(self, step: int, messages: Mapping[str, str | None]) -> list[Alarm]:
        """Return the alarms that were not raised before."""
        new = {name: text for name, text in messages.items() if text and name not in self._raised}
        self._raised |= new.keys()
        return [Alarm(step, name, text) for name, text in new.items()]

    def _broken(self, last: Metrics) -> dict[str, str | None]:
        """Return the messages about non-finite values, which corrupt the adapter."""
        names = [name for name in ("loss", "reward", "kl", "entropy") if not math.isfinite(last.get(name, 0.0))]
        self._overflows = 0 if math.isfinite(last.get("grad_norm", 0.0)) else self._overflows + 1
        if self._overflows >= (3 if self.float16 else 1):
            names.append("grad_norm")
        messages: dict[str, str | None] = dict.fromkeys(("nan", "logprob_mismatch", "policy_ratio"))
        if names:
            messages["nan"] = (
                f"{' and '.join(names)} is not finite, which corrupts the adapter; lower --train.learning-rate, and "
                "check custom rewards for divisions by zero"
            )
        mismatch = last.get(LOGPROB_MISMATCH, 0.0)
        if self.max_mismatch is not None and mismatch > self.max_mismatch:
            messages["logprob_mismatch"] = (
                f"logprobs of sampler and trainer differ by {mismatch:.2g} nats per token, expected at most "
                f"{self.max_mismatch:g}: the rollouts come from another policy than the one being trained; pass "
                "--resume, and if it happens again start over with --sampling.backend transformers, without "
                "--sampling.server-url"
            )
        clipped = last.get(_CLIP_RATIO, 0.0) if "reward" in last else 0.0  # steps that reuse rollouts have none
        if self.checks_ratio and clipped > _MAX_CLIPPED:
            messages["policy_ratio"] = (
                f"{clipped:.0%} of the tokens were clipped before the first update on them, expected at most "
                f"{_MAX_CLIPPED:.0%}: Unsloth's loss pass computes wrong logprobs, as when packed completions attend "
                "to each other; start over with --model.engine peft, or with UNSLOTH_GRPO_SEQ_PACKING=0 in the "
                "environment"
            )
        return messages

    def _collapse(self, rewards: Sequence[float]) -> str | None:
        if len(rewards) < LONG_WINDOW:
            return None
        # The policy changes little between consecutive steps, so their difference in reward is noise.
        noise = statistics.fmean((after - before) ** 2 for before, after in itertools.pairwise(rewards)) / 2
        error = noise / LONG_WINDOW
        earlier, last = rewards[-2 * LONG_WINDOW : -LONG_WINDOW], statistics.fmean(rewards[-LONG_WINDOW:])
        if len(earlier) == LONG_WINDOW and (self._best is None or statistics.fmean(earlier) > self._best[0]):
            self._best = (statistics.fmean(earlier), error)
        if self._best is None:
            return None
        best, best_error = self._best
        # For negative rewards, the threshold is half of the way back to the initial reward.
        floor = min(0.0, statistics.fmean(rewards[:LONG_WINDOW]))
        is_noise = best - last <= _STANDARD_ERRORS * math.sqrt(max(best_error, error) + error)
        if is_noise or last - floor >= (best - floor) / 2:
            return None
        return (
            f"the mean reward of the last {LONG_WINDOW} steps is {last:.2g}, its best was {best:.2g}: the policy has "
            "collapsed; use best/ if it exists, or start over with a lower --train.learning-rate"
        )

    def _signal(self, window: Sequence[Metrics], first_entropy: float) -> dict[str, str | None]:
        """Return the messages about the learning signal: rewards that differ, exploration, completions that end."""
        share, reward = _mean(window, "frac_reward_zero_std"), _mean(window, "reward")
        entropy, truncated = _mean(window, "entropy"), _mean(window, "completions/clipped_ratio")
        is_near_maximum = reward >= _NEAR_MAXIMUM * self.max_reward
        messages: dict[str, str | None] = dict.fromkeys(("zero_variance", "entropy", "truncated"))
        if share > _MAX_ZERO_VARIANCE:
            if is_near_maximum:
                advice = (
                    f", nearly all of them the maximum ({reward:.2f} of {self.max_reward:g}): the rows are learned; "
                    "train on harder ones or end the run"
                )
            elif not reward:
                first = f"on reference answers first ({self.sft}), or " if self.sft else ""
                advice = f", all of them 0; train {first}on easier rows"
            else:
                advice = (
                    ", so there is nothing to learn from; pass a larger --sampling.num-generations, a higher "
                    "--sampling.temperature, a reward with more than two values or, if --preview advises it, "
                    "--data.filter-by-difficulty"
                )
            what = f"in {share:.0%} of the groups of the last {WINDOW} steps all completions earned the same reward"
            messages["zero_variance"] = what + advice
        if entropy < _MIN_ENTROPY * first_entropy and not is_near_maximum:
            messages["entropy"] = (
                f"entropy fell from {first_entropy:.3g} to {entropy:.2g} nats per token at a reward of {reward:.2f} "
                f"of {self.max_reward:g}: the policy has stopped exploring; start over with a lower "
                "--train.learning-rate or a higher --sampling.temperature"
            )
        if truncated > _MAX_TRUNCATED:
            messages["truncated"] = (
                f"{truncated:.0%} of the completions of the last {WINDOW} steps reached the length limit; raise "
                "--sampling.max-completion-tokens, and --model.max-sequence-tokens by as much"
            )
        return messages


def _mean(steps: Sequence[Metrics], name: str) -> float:
    """Return the mean of a metric, or NaN if no step has it. All comparisons with NaN are false."""
    values = [step[name] for step in steps if name in step]
    return statistics.fmean(values) if values else math.nan
