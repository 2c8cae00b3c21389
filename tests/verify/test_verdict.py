"""The verdict on logprobs that were made for the test: what a target is, with how much rounding."""

import numpy as np
import pytest

from lora_grpo.verify.verdict import judge, judge_choices

COMPLETIONS = 16
TOKENS = 32


def made(moved, noise, *, scale=1.0, other=0.0, seed=0):
    """Return logprobs of a target that has `scale` of an adapter's movement and `other` of another one's."""
    generator = np.random.default_rng(seed)
    shape = (COMPLETIONS, TOKENS)
    base = -generator.exponential(1.0, shape)
    movement = generator.normal(0, moved, shape)
    other_movement = generator.normal(0, moved, shape)
    target = base + scale * movement + other * other_movement + generator.normal(0, noise, shape)
    return target, base, base + movement


def finding(*arguments, rounding=0.06, **options):
    return judge(*made(*arguments, **options), {}, rounding).finding


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("moved", "noise"), [(0.5, 0.02), (0.05, 0.02), (0.5, 0.3), (1e-3, 1e-6)])
def test_a_target_is_told_whether_it_is_rounded_little_or_much(moved, noise, seed):
    rounding = 0.6 if noise > 0.1 else 0.06
    options = {"rounding": rounding, "seed": seed}
    assert finding(moved, noise, scale=1, **options) == "the adapter"
    assert finding(moved, noise, scale=0, **options) == "the base"
    assert finding(moved, noise, scale=0.5, **options) == "neither"
    assert finding(moved, noise, scale=2, **options) == "neither"
    assert finding(moved, noise, scale=-1, **options) == "neither"


@pytest.mark.parametrize("seed", range(20))
def test_a_weak_adapter_in_few_bits_cannot_be_told(seed):
    for scale in (0, 0.5, 1):
        assert finding(0.01, 0.3, scale=scale, rounding=0.6, seed=seed) == "cannot tell"


def test_an_adapter_that_moves_nothing_cannot_be_told():
    assert finding(0, 0.01) == "cannot tell"


@pytest.mark.parametrize("seed", range(20))
def test_another_adapter_is_neither(seed):
    assert finding(0.5, 0.02, scale=0, other=1, seed=seed) == "neither"
    assert finding(0.5, 0.02, scale=1, other=1, seed=seed) == "neither"


@pytest.mark.parametrize("seed", range(20))
def test_an_alternative_is_named_if_it_fits_better(seed):
    target, base, adapter = made(0.5, 0.15, scale=0.7, seed=seed)
    half = base + (adapter - base) * 0.5
    exact = base + (adapter - base) * 0.7
    verdict = judge(target, base, adapter, {"half": half, "exact": exact}, 0.6)
    assert (verdict.finding, verdict.closest) == ("neither", "exact")
    target, base, adapter = made(0.5, 0.3, seed=seed)
    verdict = judge(target, base, adapter, {"half": base + (adapter - base) * 0.5}, 0.6)
    assert (verdict.finding, verdict.closest) == ("the adapter", None)


def test_the_verdict_has_the_means_of_all_tokens():
    verdict = judge([[-1.0], [-2.0, -5.0]], [[-1.0], [-3.0, -4.0]], [[-1.5], [-2.0, -5.5]], {}, 1.0)
    assert verdict.tokens == 3
    assert verdict.from_adapter == pytest.approx(1 / 3)
    assert verdict.from_adapter_worst == 0.5
    assert verdict.from_base == pytest.approx(2 / 3)
    assert verdict.moved == pytest.approx((0.5 + 1 + 1.5) / 3)


def test_the_effect_is_the_slope_of_all_tokens():
    target = [[-1.0], [-2.0, -5.0]] * 4
    verdict = judge(target, [[-1.0], [-3.0, -4.0]] * 4, [[-1.5], [-2.0, -5.5]] * 4, {}, 1.0)
    assert verdict.effect == pytest.approx((0 + 1 + 1.5) / (0.25 + 1 + 2.25))


@pytest.mark.parametrize("seed", range(20))
def test_few_completions_are_not_certain(seed):
    """A bootstrap over one completion would have an interval without width."""
    target, base, adapter = made(0.1, 0.3, scale=0, seed=seed)
    few = slice(0, 2)
    half = base + (adapter - base) * 0.5
    verdict = judge(target[few], base[few], adapter[few], {"half": half[few]}, 0.6)
    assert (verdict.finding, verdict.effect, verdict.closest) == ("cannot tell", None, None)


@pytest.mark.parametrize(
    ("of_both", "of_adapter", "of_base", "of_neither", "expected"),
    [
        (80, 20, 0, 0, "the adapter"),
        (80, 0, 20, 0, "the base"),
        (80, 18, 1, 2, "the adapter"),
        (95, 3, 2, 0, "cannot tell"),
        (100, 0, 0, 0, "cannot tell"),
        (50, 10, 10, 30, "neither"),
    ],
)
def test_greedy_tokens_tell_where_base_and_adapter_differ(of_both, of_adapter, of_base, of_neither, expected):
    is_adapters = [True] * (of_both + of_adapter) + [False] * (of_base + of_neither)
    is_bases = [True] * of_both + [False] * of_adapter + [True] * of_base + [False] * of_neither
    assert judge_choices(is_adapters, is_bases).finding == expected
