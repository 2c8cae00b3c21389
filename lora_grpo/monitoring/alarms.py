"""Alarms: detect from the metrics that a run goes wrong, and suggest changes.

docs/while-it-trains.md describes each alarm. An alarm is raised at most once in a run. To add one, add its name
to `AlarmName` in `config/schema.py`, and a method that returns its message or None to `Alarms.step`.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.config import AlarmName
from lora_grpo.evaluation import mcnemar_exact
from lora_grpo.monitoring.step_metrics import LOGPROB_MISMATCH, TEACHER_KL

WINDOW = 10
"""Number of steps to average over."""
LONG_WINDOW = 20
"""Number of steps to average the reward over, which is noisier."""
_STANDARD_ERRORS = 6.0
"""The best of many windows overestimates the true mean. A lower threshold causes false alarms on sparse rewards."""
_MAX_ZERO_VARIANCE = 0.8
"""Fraction of groups whose rewards have zero variance."""
_MAX_TRUNCATED = 0.9
"""Fraction of completions that reach the length limit."""
_MIN_ENTROPY = 0.05
"""Fraction of the initial entropy."""
_NEAR_MAXIMUM = 0.9
"""Fraction of the maximum reward above which low entropy and equal rewards mean success."""
_HACKING_P = 0.01
"""Largest p-value at which fewer correct answers are no chance."""
_LEAST_TEACHER_KL = 0.05
"""KL to the teacher, in nats per token, below which a rise does not matter."""
_MAX_OVERFLOWS = 2
"""Consecutive steps whose gradient may overflow with loss scaling."""
_MAX_CLIPPED = 0.02
"""Largest accepted fraction of clipped tokens before the first update.

With vLLM and `num_iterations`, the ratio compares the pass with gradients and the pass without. Both have the same
policy, so only rounding clips tokens. By the comments of unsloth_zoo 2026.10.9, rounding in 16 bits changes the logprob
of a batch's worst token by about 0.25 nats; clipping starts at 0.18 (epsilon 0.2). Completions that attend to each
other change some by 2.4 or more: 10% were clipped in tests/gpu_rig. Smaller errors are not noticed. The importance
sampling correction is not a part of the ratio.

In other runs there is one pass, and the ratio is 1 by construction. With vLLM, the alarm `logprob_mismatch` compares
that pass with the sampler."""

# Names of TRL's metrics
_CLIP_RATIO = "clip_ratio/region_mean"
_TRUNCATED = "completions/clipped_ratio"
_ZERO_VARIANCE = "frac_reward_zero_std"

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Alarm:
    """The problem, and the suggested change."""

    step: int
    name: AlarmName
    message: str


@dataclass(frozen=True)
class MeanReward:
    """The mean reward of some completions."""

    mean: float
    squared_error: float
    """Square of the standard error of the mean."""


@dataclass(frozen=True)
class ValidationPass:
    """What a validation pass measured."""

    step: int
    reward: float
    """Mean over the rows that could be graded."""
    passed: Mapping[str, bool]
    """Whether the completion of each row is correct, by the id of the row. Rows whose agent failed are missing."""

    @property
    def num_correct(self) -> int:
        """Number of correct completions."""
        return sum(self.passed.values())


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
    has_teacher: bool = False
    """Whether a teacher has a part in the loss, so that there is something to learn from equal rewards."""
    learns_from_rewards: bool = True
    """Whether rewards have a part in the loss beside a teacher."""
    validates_as_it_trains: bool = True
    """Whether validation and training have rows of the same difficulty, so that their rewards can be compared."""
    checks_ratio: bool = False
    """Whether the alarm `policy_ratio` is on: only rounding can clip the first use of rollouts. See `_MAX_CLIPPED`."""
    hacked: bool = False
    """Whether the last validation pass had a higher reward but fewer correct answers."""
    _steps: list[Metrics] = field(default_factory=list)
    """The finite metrics of each step."""
    _best_reward: MeanReward | None = None
    """The mean reward of the best earlier `LONG_WINDOW` steps, or of the base."""
    _passes: list[ValidationPass] = field(default_factory=list)
    _overflows: int = 0
    """Consecutive steps with a non-finite gradient norm."""
    _raised: set[AlarmName] = field(default_factory=set)
    """Names of the alarms that were raised."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Return the alarms that one step's metrics, as in metrics.jsonl, raise."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        finite_numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
        self._steps.append(finite_numbers)

        messages: dict[AlarmName, str | None] = {
            "nan": self._not_finite(numbers),
            "logprob_mismatch": self._logprob_mismatch(numbers),
            "policy_ratio": self._policy_ratio(numbers),
        }
        # Steps that reuse rollouts have no reward, and the other alarms are about rollouts.
        steps_with_reward = [step_metrics for step_metrics in self._steps if "reward" in step_metrics]
        if "reward" in finite_numbers and len(steps_with_reward) >= WINDOW:
            window = steps_with_reward[-WINDOW:]
            if not self.has_teacher:
                messages["zero_variance"] = self._zero_variance(window)
            messages["entropy"] = self._low_entropy(window, _mean(steps_with_reward[:WINDOW], "entropy"))
            messages["truncated"] = self._truncated(window)
            messages["collapse"] = self._collapse([step_metrics["reward"] for step_metrics in steps_with_reward])
        # Rows that no reward can grade have a KL to the teacher as well.
        kls = [step_metrics[TEACHER_KL] for step_metrics in self._steps if TEACHER_KL in step_metrics]
        if len(kls) >= 2 * LONG_WINDOW:
            messages["teacher_kl"] = self._teacher_kl(kls)
        graded = [step_metrics for step_metrics in steps_with_reward if TEACHER_KL in step_metrics]
        if "reward" in finite_numbers and len(graded) >= 2 * LONG_WINDOW:
            kls_of_graded = [step_metrics[TEACHER_KL] for step_metrics in graded]
            rewards = [step_metrics["reward"] for step_metrics in graded]
            messages["teacher_mistakes"] = self._teacher_mistakes(kls_of_graded, rewards)
        return self._new_alarms(step, messages)

    def validation(self, step: int, rewards: Sequence[float], passed: Mapping[str, bool]) -> list[Alarm]:
        """Return the alarms that a validation pass raises.

        Args:
            step: the step after which it ran; 0 for the base.
            rewards: rewards of the rows that could be graded.
            passed: whether the completion of each row is correct, by the id of the row; see `ValidationPass`.
        """
        reward = statistics.fmean(rewards)
        if step == 0 and len(rewards) > 1 and self.validates_as_it_trains:
            self._best_reward = MeanReward(reward, statistics.variance(rewards) / len(rewards))
        validation_pass = ValidationPass(step, reward, passed)
        self._passes.append(validation_pass)

        message = self._hacking(validation_pass)
        self.hacked = message is not None
        return self._new_alarms(step, {"hacking": message})

    def _new_alarms(self, step: int, messages: Mapping[AlarmName, str | None]) -> list[Alarm]:
        """Return the alarms that were not raised before. `messages` maps names to None where there is no problem."""
        alarms = []
        for name, message in messages.items():
            if message and name not in self._raised:
                self._raised.add(name)
                alarms.append(Alarm(step, name, message))
        return alarms

    # Values that corrupt the adapter

    def _not_finite(self, metrics: Metrics) -> str | None:
        names = [name for name in ("loss", "reward", "kl", "entropy") if not math.isfinite(metrics.get(name, 0.0))]
        if math.isfinite(metrics.get("grad_norm", 0.0)):
            self._overflows = 0
        else:
            self._overflows += 1
        max_overflows = _MAX_OVERFLOWS if self.float16 else 0
        if self._overflows > max_overflows:
            names.append("grad_norm")
        if not names:
            return None
        return (
            f"{' and '.join(names)} is not finite, which corrupts the adapter; lower --train.learning-rate, and "
            "check custom rewards for divisions by zero"
        )

    # Rollouts of another policy than the one being trained

    def _logprob_mismatch(self, metrics: Metrics) -> str | None:
        if self.max_mismatch is None:
            return None
        mismatch = metrics.get(LOGPROB_MISMATCH, 0.0)
        is_too_high = mismatch > self.max_mismatch  # false for NaN
        if not is_too_high:
            return None
        return (
            f"logprobs of sampler and trainer differ by {mismatch:.2g} nats per token, expected at most "
            f"{self.max_mismatch:g}: the rollouts come from another policy than the one being trained; pass "
            "--resume, and if it happens again start over with --sampling.backend transformers, without "
            "--sampling.server-url"
        )

    def _policy_ratio(self, metrics: Metrics) -> str | None:
        is_first_use = "reward" in metrics
        if not self.checks_ratio or not is_first_use:
            return None
        clipped = metrics.get(_CLIP_RATIO, 0.0)
        is_too_high = clipped > _MAX_CLIPPED  # false for NaN
        if not is_too_high:
            return None
        return (
            f"{clipped:.0%} of the tokens were clipped before the first update on them, expected at most "
            f"{_MAX_CLIPPED:.0%}: Unsloth's loss pass computes wrong logprobs, as when packed completions attend "
            "to each other; start over with --model.engine peft, or with UNSLOTH_GRPO_SEQ_PACKING=0 in the "
            "environment"
        )

    # The learning signal: rewards that differ, exploration, completions that end. All are means of a window.

    def _zero_variance(self, window: Sequence[Metrics]) -> str | None:
        fraction = _mean(window, _ZERO_VARIANCE)
        is_too_high = fraction > _MAX_ZERO_VARIANCE  # false for NaN: no step has the metric
        if not is_too_high:
            return None
        reward = _mean(window, "reward")
        if self._is_near_maximum(reward):
            advice = (
                f", nearly all of them the maximum ({reward:.2f} of {self.max_reward:g}): the rows are learned; "
                "train on harder ones or end the run"
            )
        elif reward == 0:
            sft_first = f"on reference answers first ({self.sft}), or " if self.sft else ""
            advice = f", all of them 0; train {sft_first}on easier rows"
        else:
            advice = (
                ", so there is nothing to learn from; pass a larger --sampling.num-generations, a higher "
                "--sampling.temperature, a reward with more than two values or, if --preview advises it, "
                "--data.filter-by-difficulty"
            )
        problem = f"in {fraction:.0%} of the groups of the last {WINDOW} steps all completions earned the same reward"
        return problem + advice

    def _low_entropy(self, window: Sequence[Metrics], first_entropy: float) -> str | None:
        entropy = _mean(window, "entropy")
        reward = _mean(window, "reward")
        is_too_low = entropy < _MIN_ENTROPY * first_entropy  # false for NaN
        if not is_too_low or self._is_near_maximum(reward):
            return None
        return (
            f"entropy fell from {first_entropy:.3g} to {entropy:.2g} nats per token at a reward of {reward:.2f} "
            f"of {self.max_reward:g}: the policy has stopped exploring; start over with a lower "
            "--train.learning-rate or a higher --sampling.temperature"
        )

    def _truncated(self, window: Sequence[Metrics]) -> str | None:
        fraction = _mean(window, _TRUNCATED)
        is_too_high = fraction > _MAX_TRUNCATED  # false for NaN
        if not is_too_high:
            return None
        return (
            f"{fraction:.0%} of the completions of the last {WINDOW} steps reached the length limit; raise "
            "--sampling.max-completion-tokens, and --model.max-sequence-tokens by as much"
        )

    def _is_near_maximum(self, reward: float) -> bool:
        return reward >= _NEAR_MAXIMUM * self.max_reward

    # Rewards that fall

    def _collapse(self, rewards: Sequence[float]) -> str | None:
        """Return a message if the reward fell below half of its best by more than noise.

        Args:
            rewards: mean reward of every step so far.
        """
        if len(rewards) < LONG_WINDOW:
            return None
        last_reward = statistics.fmean(rewards[-LONG_WINDOW:])
        squared_error = _squared_error(rewards)

        # The window before the last one may be the best so far.
        earlier_rewards = rewards[-2 * LONG_WINDOW : -LONG_WINDOW]
        if len(earlier_rewards) == LONG_WINDOW:
            earlier_reward = statistics.fmean(earlier_rewards)
            if self._best_reward is None or earlier_reward > self._best_reward.mean:
                self._best_reward = MeanReward(earlier_reward, squared_error)
        if self._best_reward is None:
            return None

        # The error of the best may be estimated from few steps, so it counts as at least that of the last window.
        best = self._best_reward
        squared_error_of_best = max(best.squared_error, squared_error)
        standard_error = math.sqrt(squared_error_of_best + squared_error)
        if best.mean - last_reward <= _STANDARD_ERRORS * standard_error:
            return None
        # For negative rewards, the threshold is half of the way back to the initial reward.
        floor = min(0.0, statistics.fmean(rewards[:LONG_WINDOW]))
        if last_reward - floor >= (best.mean - floor) / 2:
            return None
        return (
            f"the mean reward of the last {LONG_WINDOW} steps is {last_reward:.2g}, its best was {best.mean:.2g}: the "
            "policy has collapsed; use best/ if it exists, or start over with a lower --train.learning-rate"
        )

    # A teacher

    def _teacher_kl(self, kls: Sequence[float]) -> str | None:
        """Return a message if the KL to the teacher has doubled since its lowest, by more than noise.

        Args:
            kls: of every step so far, in nats per token.
        """
        *earlier_means, last_mean = _window_means(kls)
        lowest = min(earlier_means)
        has_doubled = last_mean > 2 * max(lowest, 0.0) and last_mean - lowest > _noise(kls)
        if not has_doubled or last_mean < _LEAST_TEACHER_KL:
            return None
        fix = (
            "--teacher.reward-weight or --train.learning-rate" if self.learns_from_rewards else "--train.learning-rate"
        )
        return (
            f"the KL to the teacher rose from {lowest:.2g} to {last_mean:.2g} nats per token in the mean of "
            f"{LONG_WINDOW} steps: the model moves away from its teacher; start over with a lower {fix}"
        )

    def _teacher_mistakes(self, kls: Sequence[float], rewards: Sequence[float]) -> str | None:
        """Return a message if the reward fell since its best while the KL to the teacher fell, both by more than noise.

        Args:
            kls: of every step so far, in nats per token.
            rewards: mean reward of the same steps.
        """
        *earlier_rewards, last_reward = _window_means(rewards)
        *earlier_kls, last_kl = _window_means(kls)
        best = earlier_rewards.index(max(earlier_rewards))
        reward_fell = earlier_rewards[best] - last_reward > _noise(rewards)
        kl_fell = earlier_kls[best] - last_kl > _noise(kls)
        if not (reward_fell and kl_fell):
            return None
        return (
            f"the mean reward of {LONG_WINDOW} steps fell from {earlier_rewards[best]:.2g} to {last_reward:.2g} while "
            f"the KL to the teacher fell from {earlier_kls[best]:.2g} to {last_kl:.2g}: the model copies what its "
            "teacher does wrong; evaluate the teacher, and start over with another one or a higher "
            "--teacher.reward-weight"
        )

    def _hacking(self, last: ValidationPass) -> str | None:
        """Return a message if the reward rose since the most correct pass, while correct answers fell."""
        # All passes, also the last one. Of equally correct ones, this is the first.
        most_correct = max(self._passes, key=lambda one_pass: (one_pass.num_correct, -one_pass.step))
        rows = [row for row in last.passed if row in most_correct.passed]
        correct_before = [most_correct.passed[row] for row in rows]
        correct_after = [last.passed[row] for row in rows]
        before = sum(correct_before)
        after = sum(correct_after)
        if last.reward <= most_correct.reward or after >= before:
            return None
        p_value = mcnemar_exact(correct_before, correct_after)
        if p_value >= _HACKING_P:
            return None
        return (
            f"since step {most_correct.step} validation reward rose from {most_correct.reward:.2f} to "
            f"{last.reward:.2f} while correct answers fell from {before} to {after} of {len(rows)}: the policy "
            "exploits the rewards; read completions/, lower the weights of rewards other than the grader's, and start "
            "over; best/, if it exists, is from before"
        )


def _squared_error(values: Sequence[float]) -> float:
    """Return the square of the standard error of a mean over `LONG_WINDOW` steps.

    The policy changes little between consecutive steps, so their difference is noise.

    Args:
        values: of every step so far.
    """
    squared_changes = [(after - before) ** 2 for before, after in itertools.pairwise(values)]
    noise_variance = statistics.fmean(squared_changes) / 2
    return noise_variance / LONG_WINDOW


def _noise(values: Sequence[float]) -> float:
    """Return by how much two means over `LONG_WINDOW` steps may differ by chance, for a metric of every step so far."""
    return _STANDARD_ERRORS * math.sqrt(2 * _squared_error(values))


def _window_means(values: Sequence[float]) -> list[float]:
    """Return the means of consecutive windows of `LONG_WINDOW` steps. The last one ends with the last step."""
    first = len(values) % LONG_WINDOW
    starts = range(first, len(values), LONG_WINDOW)
    return [statistics.fmean(values[start : start + LONG_WINDOW]) for start in starts]


def _mean(steps: Sequence[Metrics], name: str) -> float:
    """Return the mean of a metric, or NaN if no step has it."""
    values = [step[name] for step in steps if name in step]
    return statistics.fmean(values) if values else math.nan
