"""Which completions have no gradient: those of groups whose rewards have zero variance.

Their advantage is zero. TRL computes them like all others. Here the model does not read them, and TRL gets values for
them nevertheless (`micro_batch.py`), so that the normalization and the clipping metrics do not change, and the mean
entropy covers all completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lora_grpo.loss.micro_batch import SAMPLER_LOGPROBS

if TYPE_CHECKING:
    import torch


def rows_with_advantage(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the indices of completions with an advantage, at least one, or None for all completions.

    Every process needs a loss: if no completion has an advantage, the shortest one is read.
    """
    if SAMPLER_LOGPROBS not in inputs:
        return None
    advantages = inputs["advantages"]  # (R,)
    rows = advantages.nonzero().squeeze(1)
    if len(rows) == len(advantages):
        return None
    if len(rows) == 0:
        return inputs["completion_mask"].sum(1).argmin()[None]
    return rows
