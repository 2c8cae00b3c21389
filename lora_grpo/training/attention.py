"""Attention over a packed micro-batch, as an attention implementation of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lora_grpo.training.packing import Packing

if TYPE_CHECKING:
    import torch

NAME = "shared_prompts"


def register() -> None:
    """Register the implementation. Without a packing, it is the one named `sdpa`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Let prompts attend to themselves, and completions to their prompt and to themselves.

    Keys and values of a prompt are computed once, and every completion of its group reads them. The gradient that
    reaches them is the sum over the group.

    Args:
        query: shape (1, heads, T, head size); `key` and `value` have as many or fewer heads.

    Returns:
        Shape (1, T, heads, head size), and None for the attention weights.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    queries, keys, values = (each[0].transpose(0, 1).flatten(1) for each in (query, key, value))

    def rows(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        # Unlike indexing, an embedding lookup sums gradients in parallel, and in a fixed order on a GPU.
        return torch.nn.functional.embedding(slots, states).unflatten(2, (-1, query.shape[-1])).transpose(1, 2)

    def attention(
        query_slots: torch.Tensor, key_slots: torch.Tensor, mask: torch.Tensor | None, tokens: torch.Tensor
    ) -> torch.Tensor:
        states = rows(queries, query_slots), rows(keys, key_slots), rows(values, key_slots)
        output = sdpa_attention_forward(module, *states, mask, **kwargs)[0]
        return output.flatten(0, 1).index_select(0, tokens)

    parts = [attention(packing.prompts, packing.prompts, None, packing.in_prompts)]
    if len(packing.in_completions):
        bias = packing.bias(query.dtype)
        parts.append(attention(packing.completions, packing.context, bias, packing.in_completions))
    return torch.cat(parts)[None], None
