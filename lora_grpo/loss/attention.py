"""The attention of a packed micro-batch, as implementations that transformers can call by name."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lora_grpo.loss.packing import Packing

if TYPE_CHECKING:
    import torch

PackedAttention: TypeAlias = Literal["sdpa", "flex"]
"""How packed tokens attend: `attend` below, or `attend_in_blocks`."""

ATTENTION = "shared_prompts"
"""Name of the attention implementation `sdpa` in transformers."""
ATTENTIONS: dict[PackedAttention, str] = {"sdpa": ATTENTION, "flex": "shared_prompts_in_blocks"}
"""The names of both implementations."""


def register_attention() -> None:
    """Register the implementations. Without a packing, both are transformers' `sdpa`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTIONS["sdpa"], attend)
    AttentionInterface.register(ATTENTIONS["flex"], attend_in_blocks)
    for name in ATTENTIONS.values():
        AttentionMaskInterface.register(name, sdpa_mask)


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
        packing: of the sequence of T tokens; None if rows are padded, which transformers' `sdpa` computes.

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
        query_slots: torch.Tensor, key_slots: torch.Tensor, mask: torch.Tensor | None, token_entries: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of the tokens, without those of padding: (tokens, heads, head size).

        Args:
            token_entries: indices of the tokens in the flattened table of `query_slots`.
        """
        row_queries = take(queries, query_slots)
        row_keys = take(keys, key_slots)
        row_values = take(values, key_slots)
        output, _ = sdpa_attention_forward(module, row_queries, row_keys, row_values, mask, **kwargs)
        # From (rows, columns, heads, head size) to the entries that are tokens.
        return output.flatten(0, 1).index_select(0, token_entries)

    # Without a mask, sdpa is causal. Prompts are padded on the right, so that no token attends to padding.
    parts = [attend_rows(packing.prompt_slots, packing.prompt_slots, None, packing.prompt_entries)]
    if len(packing.completion_entries):
        bias = packing.bias(query.dtype)
        parts.append(attend_rows(packing.completion_slots, packing.context, bias, packing.completion_entries))
    return torch.cat(parts)[None], None


def attend_in_blocks(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Do the same as `attend` with FlexAttention, which takes the whole sequence and skips blocks that are masked.

    It neither copies keys and values of a prompt for its completions nor stores a mask for every pair of tokens. On a
    CPU it runs without its kernel, and is slower.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packing is None:
        options = {"scaling": scaling, "dropout": dropout, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if dropout:
        raise ValueError("FlexAttention has no dropout of attention weights")
    output = _flex_attention(query.device.type)(
        query, key, value, block_mask=packing.block_mask(), scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


@functools.cache
def _flex_attention(device: str) -> Any:
    """Return PyTorch's function. Only compiled is it a kernel; on a CPU, the compiled one has no gradient."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    if device == "cpu":
        return flex_attention
    return torch.compile(flex_attention, dynamic=True)
