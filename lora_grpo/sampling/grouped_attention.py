"""Attention for decoding on a CPU, where several query heads share a head of keys and values.

With a mask, transformers repeats keys and values for each query head, in every layer and for every token. Here, the
query heads that share one are treated as several queries of one head. The result is the same except for rounding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NAME = "lora_grpo_grouped"


def use_grouped_attention(model: Any) -> Any:
    """Make a model that only samples use this attention, if it can, and return it."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if model._supports_attention_backend and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        model.config._attn_implementation = _NAME
    return model


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with one token per row. Anything else uses transformers' `sdpa_attention_forward`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, tokens, width = query.shape
    if tokens > 1 or kwargs.get("position_bias") is not None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    scores = grouped @ key.transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
    if attention_mask is not None:  # (R, 1, 1, L), True for tokens to attend to
        scores.masked_fill_(~attention_mask, -math.inf)
    return (scores.softmax(dim=-1) @ value).reshape(rows, 1, heads, -1), None
