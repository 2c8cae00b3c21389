"""Which model a target is, from the logprobs that it reports.

For a token t that the target sampled, let d = logp_target(t) - logp_base(t), and m = logp_adapter(t) - logp_base(t),
which is how far the adapter moves the token. If the target is the adapter, d is m plus rounding; if it is the base, d
is rounding. The effect is the slope of d over m without an intercept,

    effect = sum(m d) / sum(m m)

1 for the adapter, 0 for the base, and about 0.5 for the adapter at half of its scale. Rounding is not aligned with m,
so it cancels out over many tokens: a target in 4 bits has an effect of 1, too, with a wider interval. What an effect
cannot tell, the mean difference does: a target that is neither of the two is further from both than its rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lora_grpo.evaluation import mcnemar_exact

Finding = Literal["the adapter", "the base", "neither", "cannot tell"]

_SMALLEST_MARGIN = 0.1
"""An effect this close to 1 counts as the adapter's, and one this close to 0 as the base's."""
_LARGEST_MARGIN = 0.2
"""If the 99% interval of the effect reaches further than this to one side, the effect tells nothing."""
_TYPICAL_ROUNDING = 0.5
"""Part of the largest rounding from which on a difference is not surely rounding."""
_LEAST_COMPLETIONS = 8
"""With fewer completions, an interval by their bootstrap would be too narrow."""
_RESAMPLES = 2000
"""Number of bootstrap samples of an interval."""

Logprobs = Sequence[Sequence[float]]
"""Logprobs of the tokens of C completions, in nats."""


@dataclass(frozen=True)
class Verdict:
    """Which of the two models a target is, and how that was found. Differences are means of |difference| in nats."""

    finding: Finding
    tokens: int
    from_adapter: float
    from_adapter_worst: float
    from_base: float
    moved: float
    """How far the adapter moves the base."""
    effect: float | None
    """See the docstring of this module. None if the adapter moves no token, or if there are too few completions."""
    effect_margin: float | None
    """Half of the width of the 99% interval of the effect."""
    rounding: float
    """Largest mean difference that rounding explains; see `Reference.rounding`."""
    closest: str | None = None
    """With `neither`: the name of the alternative that the target is, if it is one."""


def judge(
    target: Logprobs, base: Logprobs, adapter: Logprobs, alternatives: Mapping[str, Logprobs], rounding: float
) -> Verdict:
    """Return the verdict on a target.

    Args:
        target: what the target reports for its own completions.
        base: the base's logprobs of the same tokens.
        adapter: those of the base with the adapter.
        alternatives: those of other models that the target may be, by their names.
        rounding: see `Verdict.rounding`.
    """
    import numpy as np

    target_values = _joined(target)
    base_values = _joined(base)
    adapter_values = _joined(adapter)
    from_adapter = float(np.abs(target_values - adapter_values).mean())
    from_base = float(np.abs(target_values - base_values).mean())
    effect = None
    margin = None
    has_enough = len(target) >= _LEAST_COMPLETIONS
    if has_enough and (adapter_values != base_values).any():
        effect, margin = _effect(target, base, adapter)

    # The alternative that fits best, if it fits better than the adapter does.
    closest = None
    smallest_error = min(_squared_errors(target, adapter).sum(), _squared_errors(target, base).sum())
    for name, logprobs in alternatives.items() if has_enough else ():
        error = _squared_errors(target, logprobs).sum()
        difference = float(np.abs(target_values - _joined(logprobs)).mean())
        if error < smallest_error and difference <= rounding and _fits_better(target, logprobs, than=adapter):
            closest = name
            smallest_error = error

    may_be_adapter = from_adapter <= rounding
    may_be_base = from_base <= rounding
    finding: Finding
    if closest is not None or not (may_be_adapter or may_be_base):
        finding = "neither"
    elif effect is not None and margin is not None and margin <= _LARGEST_MARGIN:
        finding = _finding_of_effect(effect, max(_SMALLEST_MARGIN, margin))
    elif may_be_adapter and may_be_base:
        finding = "cannot tell"
    elif may_be_adapter:
        finding = "the adapter"
    else:
        finding = "the base"
    # A larger difference may be rounding, or a small part of another adapter.
    sure_rounding = _TYPICAL_ROUNDING * rounding
    if (finding == "the adapter" and from_adapter > sure_rounding) or (
        finding == "the base" and from_base > sure_rounding
    ):
        finding = "cannot tell"
    return Verdict(
        finding=finding,
        tokens=target_values.size,
        from_adapter=from_adapter,
        from_adapter_worst=float(np.abs(target_values - adapter_values).max()),
        from_base=from_base,
        moved=float(np.abs(adapter_values - base_values).mean()),
        effect=effect,
        effect_margin=margin,
        rounding=rounding,
        closest=closest if finding == "neither" else None,
    )


def _finding_of_effect(effect: float, margin: float) -> Finding:
    """Return the finding of an effect that is known well."""
    if abs(effect - 1) <= margin:
        return "the adapter"
    if abs(effect) <= margin:
        return "the base"
    return "neither"


def _joined(logprobs: Logprobs) -> Any:
    """Return the logprobs of all completions: (T,)."""
    import numpy as np

    return np.concatenate([np.asarray(row, dtype=float) for row in logprobs])


def _effect(target: Logprobs, base: Logprobs, adapter: Logprobs) -> tuple[float, float]:
    """Return the effect, and half of the width of its 99% interval by a bootstrap over completions."""
    import numpy as np

    products = []
    squares = []
    for target_row, base_row, adapter_row in zip(target, base, adapter, strict=True):
        difference = np.subtract(target_row, base_row)
        movement = np.subtract(adapter_row, base_row)
        products.append(float(movement @ difference))
        squares.append(float(movement @ movement))
    resampled = _resample(len(products))
    with np.errstate(invalid="ignore"):  # a resample may have only completions that the adapter does not move
        effects = np.asarray(products)[resampled].sum(axis=1) / np.asarray(squares)[resampled].sum(axis=1)
    low, high = np.nanpercentile(effects, [0.5, 99.5])
    return sum(products) / sum(squares), float(high - low) / 2


def _fits_better(target: Logprobs, alternative: Logprobs, *, than: Logprobs) -> bool:
    """Return whether an alternative has a smaller squared error, by the 99% interval of the difference."""
    import numpy as np

    gains = _squared_errors(target, than) - _squared_errors(target, alternative)
    return bool(np.percentile(gains[_resample(len(gains))].sum(axis=1), 0.5) > 0)


def _squared_errors(target: Logprobs, logprobs: Logprobs) -> Any:
    """Return the sum of squared differences in each completion: (C,)."""
    import numpy as np

    errors = [np.square(np.subtract(row, other_row)).sum() for row, other_row in zip(target, logprobs, strict=True)]
    return np.asarray(errors)


def _resample(num_completions: int) -> Any:
    """Return the indices of the bootstrap samples of C completions: (`_RESAMPLES`, C)."""
    import numpy as np

    return np.random.default_rng(0).integers(num_completions, size=(_RESAMPLES, num_completions))


# Targets without logprobs


_LARGEST_SHARE_OF_OTHERS = 0.1
"""If neither model would have chosen more than this share of the tokens, the target is neither of the two."""
_P_VALUE = 0.001


@dataclass(frozen=True)
class Choices:
    """How often the greedy tokens of a target are those of the adapter, and those of the base."""

    finding: Finding
    tokens: int
    as_adapter: float
    """Share of tokens that the adapter would have chosen."""
    as_base: float
    p_value: float
    """Of the exact sign test on the tokens that only one of the two would have chosen."""


def judge_choices(is_adapters: Sequence[bool], is_bases: Sequence[bool]) -> Choices:
    """Return the verdict on the greedy tokens of a target that reports no logprobs.

    Args:
        is_adapters: for each token, whether the adapter's model would have chosen it.
        is_bases: the same for the base.
    """
    num_tokens = len(is_adapters)
    as_adapter = sum(is_adapters) / num_tokens
    as_base = sum(is_bases) / num_tokens
    either = [is_adapter or is_base for is_adapter, is_base in zip(is_adapters, is_bases, strict=True)]
    p_value = mcnemar_exact(is_bases, is_adapters)

    finding: Finding
    if 1 - sum(either) / num_tokens > _LARGEST_SHARE_OF_OTHERS:
        finding = "neither"
    elif p_value > _P_VALUE:
        finding = "cannot tell"
    elif as_adapter > as_base:
        finding = "the adapter"
    else:
        finding = "the base"
    return Choices(finding, num_tokens, as_adapter, as_base, p_value)
