"""How good is a model, and did training change it: pass@k, its interval, and tests that pair tasks.

Two kinds of evaluation, two kinds of statistics:

- one greedy sample a task (pass or fail): `wilson_interval`, `mcnemar_exact`;
- many samples a task (a pass@k between 0 and 1): `bootstrap_interval`, `paired_permutation`.

Both compare with `difference_interval` and `minimum_detectable_change`. Tasks are what is drawn at random: an interval
speaks of the rate on all tasks like these, and a comparison pairs each task with itself.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lora_grpo.errors import UserError

_AS_THE_HARNESS = 1000
"""Samples of a task up to which pass@k is computed as HumanEval's own harness does."""
_CHUNK_NUMBERS = 2_000_000  # random numbers held at once: 16 MB, whatever the number of tasks and resamples


class Interval(NamedTuple):
    """A confidence interval, as fractions (0.42 is 42 %)."""

    low: float
    high: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k samples of a task is correct.

    Args:
        num_samples: n, samples drawn for the task.
        num_correct: c, how many of them passed.
        k: the budget of samples the estimate is about, 1 to n.

    Returns:
        1 - C(n-c, k) / C(n, k): up to n = 1000 in the operations of HumanEval's own harness, so that the last digit is
        the same, and above to within a few units in the last place.

    Raises:
        UserError: k is outside 1..n, or c outside 0..n.

    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    if k < 1:
        raise UserError(f"k={k} is not a number of samples; pass --k 1 or more")
    if k > num_samples:
        raise UserError(f"k={k} exceeds num_samples={num_samples}; pass --num-samples {k}")
    if not 0 <= num_correct <= num_samples:
        raise UserError(f"num_correct={num_correct} is outside 0..{num_samples} (num_samples); recount the verdicts")
    if num_samples - num_correct < k:
        return 1.0
    if num_samples <= _AS_THE_HARNESS:
        return float(1.0 - np.prod(1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1)))
    # C(n-c,k)/C(n,k) is symmetric in k and c, so the product needs only the smaller of the two as its length. Summing
    # logarithms and ending with expm1 keeps the digits of a small pass@k, which 1 - product would cancel.
    shorter, longer = sorted((k, num_correct))
    if shorter == 1:
        return longer / num_samples
    return 0.0 - math.expm1(math.fsum(math.log1p(-longer / (num_samples - i)) for i in range(shorter)))


def per_task_pass_at_k(num_samples: ArrayLike, num_correct: ArrayLike, k: int) -> NDArray[np.float64]:
    """Estimate pass@k of every task.

    Args:
        num_samples: (tasks,) whole numbers, or one number for all tasks.
        num_correct: (tasks,) whole numbers.
        k: the budget of samples, at most the smallest of `num_samples`.

    Returns:
        (tasks,) values in 0..1, for `bootstrap_interval` and the paired functions.

    Raises:
        UserError: no tasks, counts that are not whole numbers, shapes that differ, or what `pass_at_k` refuses.
    """
    correct, samples = np.asarray(num_correct), np.asarray(num_samples)
    if correct.ndim != 1 or correct.size == 0 or samples.shape not in ((), correct.shape):
        shapes = f"num_samples has shape {samples.shape} and num_correct {correct.shape}"
        raise UserError(f"{shapes}, expected one (tasks,) for both, not empty; count each task's verdicts once")
    if correct.dtype.kind not in "iub" or samples.dtype.kind not in "iu":
        raise UserError(f"got {samples.dtype} and {correct.dtype}, expected whole numbers; pass counts, not rates")
    pairs = zip(np.broadcast_to(samples, correct.shape).tolist(), correct.tolist(), strict=True)
    return np.array([pass_at_k(n, int(c), k) for n, c in pairs])


def estimate(counts: Sequence[tuple[int, int]], k: int, seed: int) -> tuple[NDArray[np.float64], Interval]:
    """Estimate pass@k of every task, and the 95 % interval of their mean.

    Args:
        counts: (samples, passed) of each task.
        k: the budget of samples, at most the fewest samples of a task.
        seed: seed of the bootstrap, used where tasks have several samples; with one sample each the interval is
            Wilson's.
    """
    total, passed = (np.array(column) for column in zip(*counts, strict=True))
    values = per_task_pass_at_k(total, passed, k)
    if total.max() == 1:
        return values, wilson_interval(int(passed.sum()), len(total))
    return values, bootstrap_interval(values, seed=seed)


def wilson_interval(num_correct: int, num_trials: int, confidence: float = 0.95) -> Interval:
    """Bound a pass rate measured with one pass-or-fail trial a task.

    Args:
        num_correct: tasks that passed.
        num_trials: tasks tried, 1 or more.
        confidence: fraction of such intervals that hold the true rate.

    Returns:
        The score interval; never of zero width, never outside 0..1.

    Raises:
        UserError: counts or confidence out of range.

    Source: Wilson 1927, doi:10.1080/01621459.1927.10502953.
    """
    if num_trials < 1 or not 0 <= num_correct <= num_trials:
        raise UserError(f"num_correct={num_correct} of num_trials={num_trials} is no rate; evaluate 1 task or more")
    z = _normal_quantile("confidence", confidence, tail=(1 - confidence) / 2)
    rate = num_correct / num_trials
    centre = rate + z * z / (2 * num_trials)
    half_width = z * math.sqrt(rate * (1 - rate) / num_trials + z * z / (4 * num_trials**2))
    scale = 1 + z * z / num_trials
    low = 0.0 if num_correct == 0 else (centre - half_width) / scale  # rounding would leave ±1e-18
    high = 1.0 if num_correct == num_trials else (centre + half_width) / scale
    return Interval(low, high)


def bootstrap_interval(
    per_task_values: ArrayLike, confidence: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Bound the mean over tasks by resampling tasks, which carries the noise of their samples along.

    Args:
        per_task_values: (tasks,) fractions in 0..1, such as `per_task_pass_at_k`.
        confidence: fraction of such intervals that hold the true mean; below some 30 tasks fewer do.
        num_resamples: resampled means to take quantiles of.
        seed: of the resampling; the same seed gives the same interval.

    Returns:
        The percentile interval. Where all tasks have one value v, resampling would say that nothing can vary; instead
        the Wilson bound u on "0 of these tasks differ from v" gives the lowest and highest mean if a fraction u did.
        For all-0 and all-1 that is exactly `wilson_interval` with tasks as trials.

    Raises:
        UserError: no tasks, values outside 0..1, or settings out of range.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    return _bootstrap_mean(_fractions(per_task_values), (0.0, 1.0), confidence, num_resamples, seed)


def difference_interval(
    before_values: ArrayLike,
    after_values: ArrayLike,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Bound the mean change, after minus before, by resampling pairs; arguments and errors as in `bootstrap_interval`.

    Args:
        before_values: (tasks,) fractions in 0..1, or pass-or-fail.
        after_values: (tasks,) of the same tasks in the same order.
    """
    return _bootstrap_mean(_changes(before_values, after_values), (-1.0, 1.0), confidence, num_resamples, seed)


def mcnemar_exact(before: ArrayLike, after: ArrayLike) -> float:
    """Test whether two models pass at the same rate, from one pass-or-fail sample of each on every task.

    Args:
        before: (tasks,) booleans.
        after: (tasks,) booleans of the same tasks in the same order.

    Returns:
        Two-sided p: twice the smaller binomial tail over the tasks that changed, at most 1; 1 if none did.

    Raises:
        UserError: no tasks, lengths that differ, or values other than pass and fail.

    Source: McNemar 1947, doi:10.1007/BF02295996, with exact binomial tails.
    """
    changes = _changes(before, after)
    if not np.isin(np.asarray([before, after], dtype=np.float64), (0.0, 1.0)).all():
        raise UserError("mcnemar_exact got fractions, expected pass or fail; use paired_permutation for sampled pass@1")
    gained, lost = int((changes > 0).sum()), int((changes < 0).sum())
    term, tail = 1, 0  # whole numbers: term runs through C(gained + lost, i)
    for i in range(min(gained, lost) + 1):
        tail += term
        term = term * (gained + lost - i) // (i + 1)
    return min(1.0, 2 * tail / 2 ** (gained + lost))


def paired_permutation(
    before_values: ArrayLike, after_values: ArrayLike, num_permutations: int = 10_000, seed: int = 0
) -> float:
    """Test whether two models differ, by swapping before and after on random tasks and comparing the mean change.

    Args:
        before_values: (tasks,) fractions in 0..1, such as pass@1 of many samples.
        after_values: (tasks,) of the same tasks in the same order.
        num_permutations: random swaps to try; where all swaps are no more than this, each is tried once instead.
        seed: of the swaps; the same seed gives the same p.

    Returns:
        Two-sided p; never 0, because the swap that was observed counts as one.

    Raises:
        UserError: no tasks, lengths that differ, values outside 0..1, or num_permutations below 1.

    Source: Phipson and Smyth 2010 (arXiv:1603.05766), for counting the observed swap.
    """
    changes = _changes(before_values, after_values)
    changes = changes[changes != 0]  # swapping equals changes nothing
    sizes, counts = np.unique(np.abs(changes), return_counts=True)
    observed = abs(changes.sum()) - 1e-9 * np.abs(changes).sum()  # a tie must stay a tie under rounding
    if 2**changes.size <= num_permutations:
        sums = np.zeros(1)
        for change in changes:
            sums = np.concatenate([sums + change, sums - change])
        return float((np.abs(sums) >= observed).mean())
    rng = np.random.default_rng(seed)
    num_as_extreme = 1
    for rows in _chunks(num_permutations, sizes.size):
        num_positive = rng.binomial(counts, 0.5, size=(rows, sizes.size))  # tasks with changes of one size, at once
        num_as_extreme += int((np.abs((2 * num_positive - counts) @ sizes) >= observed).sum())
    return num_as_extreme / (num_permutations + 1)


def minimum_detectable_change(
    before_values: ArrayLike, after_values: ArrayLike, power: float = 0.8, alpha: float = 0.05
) -> float | None:
    """Say how small a true change this evaluation could still have told from none.

    Args:
        before_values: (tasks,) fractions in 0..1, or pass-or-fail.
        after_values: (tasks,) of the same tasks in the same order.
        power: probability that a change of the returned size is detected.
        alpha: largest two-sided p that counts as detected.

    Returns:
        The change of the mean, as a fraction, by the normal approximation: (z_power + z_alpha/2) · sd / sqrt(tasks).
        Where next to nothing changed, sd says too little: a change would itself bring variance, so the result is at
        least what it takes when every changed task moves one way by the smallest step seen (a whole task if none).
        None if no change could be detected with so few tasks.

    Raises:
        UserError: no tasks, lengths that differ, values outside 0..1, or settings out of range.

    Source: Miller 2024 (arXiv:2411.00640), power analysis, with the paired variance measured.
    """
    z = _normal_quantile("power", power, tail=1 - power) + _normal_quantile("alpha", alpha, tail=alpha / 2)
    changes = _changes(before_values, after_values)
    by_spread = z * float(changes.std(ddof=1)) / math.sqrt(changes.size) if changes.size > 1 else 0.0
    step = float(np.abs(changes[changes != 0]).min(initial=1.0))
    by_step = step * z * z / (changes.size + z * z)  # solves change = z · sqrt((step · change - change²) / tasks)
    change = max(by_spread, by_step)
    smallest_p = 2.0 ** (1 - changes.size)  # every task moved the same way
    return change if change <= 1 and smallest_p <= alpha else None


def _bootstrap_mean(
    values: NDArray[np.float64], bounds: tuple[float, float], confidence: float, num_resamples: int, seed: int
) -> Interval:
    unseen = wilson_interval(0, values.size, confidence).high
    distinct, counts = np.unique(values, return_counts=True)
    if distinct.size == 1:
        low, high = ((1 - unseen) * float(distinct[0]) + unseen * bound for bound in bounds)
        return Interval(low, high)
    rng = np.random.default_rng(seed)
    # Drawing how often each distinct value comes up is drawing tasks with replacement, and pass@k has few values.
    share = counts / values.size
    draws = (rng.multinomial(values.size, share, size=rows) for rows in _chunks(num_resamples, distinct.size))
    means = np.concatenate([draw @ distinct for draw in draws]) / values.size
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def _chunks(num_rows: int, row_size: int) -> list[int]:
    if num_rows < 1:
        raise UserError(f"got {num_rows} resamples, expected 1 or more; pass 10000")
    rows = max(1, _CHUNK_NUMBERS // row_size)
    return [min(rows, num_rows - start) for start in range(0, num_rows, rows)]


def _changes(before: ArrayLike, after: ArrayLike) -> NDArray[np.float64]:
    first, second = _fractions(before), _fractions(after)
    if first.size != second.size:
        raise UserError(f"got {first.size} tasks before, {second.size} after; evaluate both models on the same tasks")
    return np.round(second - first, 12)  # 0.3 - 0.2 and 0.2 - 0.1 are one change, and one distinct value


def _fractions(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise UserError(f"per-task values have shape {array.shape}, expected (tasks,); evaluate at least one task")
    outside = ~((array >= 0) & (array <= 1))  # true for NaN
    if outside.any():
        task = int(outside.argmax())
        raise UserError(f"value of task {task} is {array[task]}, expected 0..1; pass fractions, not per cent")
    return array


def _normal_quantile(name: str, value: float, tail: float) -> float:
    if not 0 < value < 1:
        raise UserError(f"{name}={value} is not between 0 and 1; pass a fraction such as 0.95")
    return NormalDist().inv_cdf(1 - tail)
