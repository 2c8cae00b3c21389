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


def rows_with_advantage(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the indices of completions with an advantage, at least one, or None for all completions.

    An advantage of zero counts as none. Every process needs a loss: if no completion has an advantage, the shortest one
    is read.
    """
    # The sampler's logprobs stand in for those of the completions that are left out.
    if SAMPLER_LOGPROBS not in inputs:
        return None
    advantages = inputs["advantages"]  # (R,)
    rows = advantages.nonzero().squeeze(1)
    if len(rows) == len(advantages):
        return None
    if len(rows) == 0:
        return inputs["completion_mask"].sum(1).argmin()[None]
    return rows
