"""The attention of a packed micro-batch, as an implementation that transformers can call by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lora_grpo.loss.packing import Packing

if TYPE_CHECKING:
    import torch

ATTENTION = "shared_prompts"
"""Name of the attention implementation in transformers."""


def register_attention() -> None:
    """Register the implementation. Without a packing, it is the one named `sdpa`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


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

    head_size = query.shape[-1]
    queries = query[0].transpose(0, 1).flatten(1)  # (T, heads * head size)
    keys = key[0].transpose(0, 1).flatten(1)
    values = value[0].transpose(0, 1).flatten(1)

    def take(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the states of a table of slots as rows that attention takes: (rows, heads, columns, head size)."""
        # Unlike indexing, an embedding lookup sums gradients in parallel, and in a fixed order on a GPU.
        rows = torch.nn.functional.embedding(slots, states)  # (rows, columns, heads * head size)
        return rows.unflatten(2, (-1, head_size)).transpose(1, 2)

    def attend_rows(
        query_slots: torch.Tensor, key_slots: torch.Tensor, mask: torch.Tensor | None, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of the tokens, without those of padded entries: (tokens, heads, head size)."""
        row_queries = take(queries, query_slots)
        row_keys = take(keys, key_slots)
        row_values = take(values, key_slots)
        output, _ = sdpa_attention_forward(module, row_queries, row_keys, row_values, mask, **kwargs)
        return output.flatten(0, 1).index_select(0, tokens)

    # Without a mask, sdpa is causal. Prompts are padded on the right, so that no token attends to padding.
    parts = [attend_rows(packing.prompts, packing.prompts, None, packing.in_prompts)]
    if len(packing.in_completions):
        bias = packing.bias(query.dtype)
        parts.append(attend_rows(packing.completions, packing.context, bias, packing.in_completions))
    return torch.cat(parts)[None], None
