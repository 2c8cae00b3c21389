"""Which completions have no gradient: those whose advantage is zero.

Most are in groups whose rewards are all equal. Others could not be graded, or their reward equals the mean of their
group. TRL computes them like all others. Here the model does not read them. TRL nevertheless gets values for them
(`micro_batch.py`), so that the normalization and the clipping metrics do not change, and the mean entropy covers all
completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lora_grpo.loss.micro_batch import SAMPLER_LOGPROBS

if TYPE_CHECKING:
    import torch


def rows_with_advantage(inputs: Mapping[str, Any], *, needs_one: bool = False) -> torch.Tensor | None:
    """Return the indices of completions with an advantage, shape (K,), or None for all completions.

    An advantage of zero counts as none.

    Args:
        inputs: tensors of TRL's loss.
        needs_one: whether the model must read something. If no completion has an advantage, that is the shortest one.
    """
    # The sampler's logprobs stand in for those of the completions that are left out.
    if SAMPLER_LOGPROBS not in inputs:
        return None
    advantages = inputs["advantages"]  # (R,)
    rows = advantages.nonzero().squeeze(1)
    if len(rows) == len(advantages):
        return None
    if needs_one and not len(rows):
        return inputs["completion_mask"].sum(1).argmin()[None]
    return rows


def zero_of(model: Any) -> torch.Tensor:
    """Return 0 as a function of all trained weights, whose gradients are then 0: a loss without a forward pass."""
    zero = 0.0
    for parameter in model.parameters():
        if parameter.requires_grad:
            zero = zero + 0 * parameter.flatten()[:1].sum()
    return zero
