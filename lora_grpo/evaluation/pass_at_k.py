"""Statistics of an evaluation: pass@k, 95% confidence intervals, and paired tests of two models.

- One sample per problem (pass or fail): `wilson_interval`, `mcnemar_exact`.
- Several samples per problem (pass@k between 0 and 1): `bootstrap_interval`, `paired_permutation`.

Both are compared with `difference_interval` and `minimum_detectable_change`. The problems are treated as a random
sample. Comparisons are paired: both arguments list the same problems in the same order, with values from 0 to 1.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lora_grpo.errors import UserError

_ALPHA = 0.05
_Z = NormalDist().inv_cdf(1 - _ALPHA / 2)
_POWER = 0.8
_FEW_PROBLEMS = 5
"""If fewer problems than this differ from an extreme value, such as a pass rate of 0, a bootstrap is too narrow."""


class Interval(NamedTuple):
    """A 95% confidence interval, as fractions."""

    low: float
    high: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples of a problem is correct.

    With n samples of the problem, of which c are correct, the estimate is 1 - C(n-c, k) / C(n, k). It is computed with
    the same operations as in HumanEval's harness, so that every digit agrees.

    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    if k > num_samples:
        raise UserError(f"k={k} exceeds num_samples={num_samples}; expected {num_samples} or less")
    if num_samples - num_correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1)))


def estimate_pass_at_k(
    counts: Sequence[tuple[int, int]], k: int, seed: int = 0
) -> tuple[NDArray[np.float64], Interval]:
    """Estimate pass@k for every problem from its (samples, passed), and the interval of the mean.

    The interval is Wilson's if each problem has one sample, else `bootstrap_interval` with the seed.
    """
    values = np.array([pass_at_k(samples, passed, k) for samples, passed in counts])
    if all(samples == 1 for samples, _ in counts):
        return values, wilson_interval(sum(passed for _, passed in counts), len(counts))
    return values, bootstrap_interval(values, seed=seed)


def wilson_interval(num_correct: float, num_trials: int) -> Interval:
    """Return the score interval of a pass rate. It is always within 0..1 and wider than zero.

    Source: Wilson 1927, doi:10.1080/01621459.1927.10502953.
    """
    rate = num_correct / num_trials
    center = rate + _Z * _Z / (2 * num_trials)
    half_width = _Z * math.sqrt(rate * (1 - rate) / num_trials + _Z * _Z / (4 * num_trials**2))
    scale = 1 + _Z * _Z / num_trials
    low = (center - half_width) / scale
    high = (center + half_width) / scale
    # Exactly 0 and 1, without a rounding error of ±1e-18.
    if num_correct == 0:
        low = 0.0
    if num_correct == num_trials:
        high = 1.0
    return Interval(low, high)


def bootstrap_interval(values_by_problem: ArrayLike, num_resamples: int = 10_000, seed: int = 0) -> Interval:
    """Return the percentile interval of the mean over problems.

    Resampling problems also accounts for the noise of samples. The interval's coverage is below 95% for fewer than
    about 30 problems.

    If fewer than 5 problems differ from 0, or from 1, resampling would nearly rule out what the sample hardly has, such
    as more than three passes after a single one. The interval is then Wilson's of the sum of the values. It also holds
    for values between 0 and 1: no values with the same mean have a larger variance than 0 and 1.

    If all problems have the same value between 0 and 1, resampling would give zero width. The interval then allows for
    other problems with another value, which are not in the sample: a fraction up to the upper Wilson bound of "0 of
    these problems". It goes from the mean in which this fraction has the lowest possible value, 0, to that in which it
    has the highest, 1.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13; Bhatia and Davis 2000, American
    Mathematical Monthly 107, 353-357, for the variance.
    """
    values = np.asarray(values_by_problem, dtype=np.float64)
    if _are_nearly_all(values, 0.0) or _are_nearly_all(values, 1.0):
        return wilson_interval(float(values.sum()), values.size)
    return _bootstrap_mean(values, (0.0, 1.0), num_resamples, seed)


def difference_interval(before: ArrayLike, after: ArrayLike, num_resamples: int = 10_000, seed: int = 0) -> Interval:
    """Return the interval of the mean change, after minus before: a bootstrap, see `bootstrap_interval`.

    With fewer than 5 changed problems, resampling would rule out what the sample does not have, such as any loss after
    a single gain. The interval then combines those of the mean gain and of the mean loss. Both are Wilson's, for the
    reason that `bootstrap_interval` gives. If no problem changed, this equals the rule for equal values.

    Source: Zou and Donner 2008, Statistics in Medicine 27, 1693-1702 (MOVER).
    """
    changes = _changes(before, after)
    if not _are_nearly_all(changes, 0.0):
        return _bootstrap_mean(changes, (-1.0, 1.0), num_resamples, seed)
    gained = float(changes.clip(min=0).sum())  # problems; one that gains a half counts as a half
    lost = float((-changes).clip(min=0).sum())
    gain = gained / changes.size
    loss = lost / changes.size
    gain_interval = wilson_interval(gained, changes.size)
    loss_interval = wilson_interval(lost, changes.size)
    margin_below = math.hypot(gain - gain_interval.low, loss_interval.high - loss)
    margin_above = math.hypot(gain_interval.high - gain, loss - loss_interval.low)
    return Interval(gain - loss - margin_below, gain - loss + margin_above)


def mcnemar_exact(before: ArrayLike, after: ArrayLike) -> float:
    """Return the two-sided p-value for equal pass rates, with one pass-or-fail sample per model and problem.

    It is twice the smaller binomial tail over the problems that changed, at most 1.

    Source: McNemar 1947, doi:10.1007/BF02295996, with exact binomial tails.
    """
    changes = _changes(before, after)
    gained = int((changes > 0).sum())
    lost = int((changes < 0).sum())
    tail = sum(math.comb(gained + lost, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (gained + lost))


def paired_permutation(before: ArrayLike, after: ArrayLike, num_permutations: int = 10_000, seed: int = 0) -> float:
    """Return the two-sided p-value for equal models, from swapping before and after on random problems.

    If there are at most `num_permutations` possible swaps, each is tried once. The observed assignment is counted.

    Source: Phipson and Smyth 2010 (arXiv:1603.05766), for counting the observed assignment.
    """
    changes = _changes(before, after)
    changes = changes[changes != 0]  # swapping equal values has no effect
    # The statistic is the absolute value of the summed changes. The margin counts ties in spite of rounding.
    observed = abs(changes.sum()) - 1e-9 * np.abs(changes).sum()

    if 2**changes.size <= num_permutations:
        sums = np.zeros(1)  # of every assignment: a swap changes the sign of a problem's change
        for change in changes:
            sums = np.concatenate([sums + change, sums - change])
        return float((np.abs(sums) >= observed).mean())

    # Random signs. Only the number of positive changes of each size matters, and pass@k has few sizes.
    sizes, counts = np.unique(np.abs(changes), return_counts=True)
    num_positive = np.random.default_rng(seed).binomial(counts, 0.5, size=(num_permutations, sizes.size))
    num_negative = counts - num_positive
    sums = (num_positive - num_negative) @ sizes
    num_as_extreme = 1 + int((np.abs(sums) >= observed).sum())  # 1 is the observed assignment
    return num_as_extreme / (num_permutations + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for several tests, in the same order.

    Rejecting those below 5% rejects any true hypothesis with a probability of at most 5%.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    """
    num_tests = len(p_values)
    smallest_first = sorted(range(num_tests), key=p_values.__getitem__)
    adjusted = [0.0] * num_tests
    highest = 0.0  # an adjusted value is never below that of a smaller p-value
    for rank, index in enumerate(smallest_first):
        highest = max(highest, min(1.0, (num_tests - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def minimum_detectable_change(before: ArrayLike, after: ArrayLike) -> float | None:
    """Return the smallest change that is detected at p < 0.05 with 80% power; None if there are too few problems.

    By the normal approximation, it is (z_power + z_alpha/2) · sd / sqrt(problems). If few problems changed, the
    measured sd is too small, because the change to detect would itself add variance. The result is therefore never
    below a second estimate, with the variance of the change to detect: some problems move in the same direction, each
    by the smallest observed step (1 if no problem changed), and the others stay.

    Source: Miller 2024 (arXiv:2411.00640), power analysis, here with the measured paired variance.
    """
    z = NormalDist().inv_cdf(_POWER) + _Z
    changes = _changes(before, after)
    by_spread = 0.0
    if changes.size > 1:
        by_spread = z * float(changes.std(ddof=1)) / math.sqrt(changes.size)
    step = float(np.abs(changes[changes != 0]).min(initial=1.0))
    # A fraction change / step of the problems moves. Solves change = z · sqrt((step · change - change²) / problems).
    by_step = step * z * z / (changes.size + z * z)
    change = max(by_spread, by_step)
    smallest_p = 2.0 ** (1 - changes.size)  # if all problems move in the same direction
    return change if change <= 1 and smallest_p <= _ALPHA else None


def _are_nearly_all(values: NDArray[np.float64], extreme: float) -> bool:
    """Return whether fewer than 5 values, of P problems, differ from one."""
    return int(np.count_nonzero(values != extreme)) < _FEW_PROBLEMS


def _bootstrap_mean(
    values: NDArray[np.float64], bounds: tuple[float, float], num_resamples: int, seed: int
) -> Interval:
    """Return the percentile interval of the mean of values (P,), each of which is within the bounds."""
    distinct, counts = np.unique(values, return_counts=True)
    if distinct.size == 1:  # see `bootstrap_interval`
        lowest, highest = bounds
        fraction_of_others = wilson_interval(0, values.size).high
        part_of_same = (1 - fraction_of_others) * float(distinct[0])
        return Interval(part_of_same + fraction_of_others * lowest, part_of_same + fraction_of_others * highest)
    # Sampling the count of each distinct value is equivalent to resampling problems, and pass@k has few distinct
    # values.
    drawn = np.random.default_rng(seed).multinomial(values.size, counts / values.size, size=num_resamples)
    low, high = np.quantile(drawn @ distinct / values.size, [_ALPHA / 2, 1 - _ALPHA / 2])
    return Interval(float(low), float(high))


def _changes(before: ArrayLike, after: ArrayLike) -> NDArray[np.float64]:
    """Return after minus before for each problem: (P,)."""
    changes = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    return np.round(changes, 12)  # so that 0.3 - 0.2 equals 0.2 - 0.1
