"""A packed micro-batch: its layout, in which each prompt is stored once and nothing is padded, and its attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ATTENTION = "shared_prompts"
"""Name of the attention implementation in transformers."""


@dataclass(frozen=True)
class Packing:
    """R completions of P distinct prompts in one sequence of T tokens: all prompts, then all completions.

    The last token of a completion is left out, because nothing is predicted from it. Slots are positions in the
    sequence. Slot tables are padded on the right with slot 0.
    """

    ids: torch.Tensor
    """Token ids, shape (1, T)."""
    positions: torch.Tensor
    """Position of each token in its own row, shape (1, T)."""
    prompts: torch.Tensor
    """Slots of the prompts, shape (P, longest prompt)."""
    in_prompts: torch.Tensor
    """Indices of the tokens among the entries of `prompts`, shape (tokens of all prompts,)."""
    completions: torch.Tensor
    """Slots of the completions, shape (R, C). C is zero if no completion has more than one token."""
    in_completions: torch.Tensor
    """Indices of the tokens among the entries of `completions`, shape (tokens of all completions,)."""
    context: torch.Tensor
    """Slots that a completion attends to, its prompt's and its own: shape (R, longest prompt + C)."""
    visible: torch.Tensor
    """The entries of `context` that each token of a completion attends to, shape (R, 1, C, longest prompt + C)."""
    predecessors: torch.Tensor
    """Slot of the token from which each completion token is predicted, shape (R, completion width)."""
    _biases: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, repr=False)

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """Return `visible` as a mask to add to attention scores. One tensor serves all layers."""
        import torch

        if dtype not in self._biases:
            hidden = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            self._biases[dtype] = hidden.masked_fill_(~self.visible, torch.finfo(dtype).min)
        return self._biases[dtype]


def pack(ids: torch.Tensor, mask: torch.Tensor, completion_width: int) -> Packing:
    """Pack rows of left-padded prompts and right-padded completions.

    Args:
        ids: token ids, shape (R, prompt width + completion width).
        mask: 1 for tokens and 0 for padding, of the same shape.
        completion_width: number of columns of the completions.
    """
    import torch

    device, width = ids.device, completion_width
    prompt_ids, prompt_mask = ids[:, :-width], mask[:, :-width].bool()
    # Padding is replaced with -1, so that equal rows are equal prompts.
    distinct, which = torch.unique(prompt_ids.masked_fill(~prompt_mask, -1), dim=0, return_inverse=True)
    lengths = (distinct >= 0).sum(1)
    longest, prompt_tokens = int(lengths.max()), int(lengths.sum())
    place = torch.arange(max(longest, width), device=device)
    in_prompt = place[:longest] < lengths[:, None]
    prompts = _slots(in_prompt, 0)

    completion_mask = mask[:, -width:].bool()
    counts = completion_mask.sum(1)
    columns = int(counts.max().clamp(min=1)) - 1
    in_completion = place[:columns] < counts[:, None] - 1
    completions = _slots(in_completion, prompt_tokens)

    causal = (place[:columns] <= place[:columns, None]).expand(len(ids), -1, -1)
    visible = torch.cat([in_prompt[which][:, None].expand(-1, columns, -1), causal], dim=2)[:, None]
    positions = [place[:longest].expand_as(in_prompt)[in_prompt]]
    positions += [(place[:columns] + lengths[which][:, None])[in_completion]]

    last = prompts.gather(1, lengths[:, None] - 1)[which]
    predecessors = torch.zeros_like(completion_mask, dtype=torch.long)
    predecessors[:, : columns + 1] = torch.cat([last, completions], dim=1)
    return Packing(
        ids=torch.cat([distinct[distinct >= 0], ids[:, -width:][:, :columns][in_completion]])[None],
        positions=torch.cat(positions)[None],
        prompts=prompts,
        in_prompts=in_prompt.flatten().nonzero().squeeze(1),
        completions=completions,
        in_completions=in_completion.flatten().nonzero().squeeze(1),
        context=torch.cat([prompts[which], completions], dim=1),
        visible=visible,
        predecessors=predecessors,
    )


def _slots(present: torch.Tensor, first: int) -> torch.Tensor:
    """Number the entries that are present, row by row, from `first`. Other entries are 0."""
    numbers = present.flatten().cumsum(0).view(present.shape) - 1 + first
    return numbers.masked_fill(~present, 0)


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
