"""A packed micro-batch: one sequence in which each prompt is stored once and nothing is padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lora_grpo.loss.trees import Ancestry, ancestry

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class Packing:
    """R completions of P distinct prompts in one sequence of T tokens: all prompts, then all completions.

    The last token of a completion is left out, because nothing is predicted from it. A slot is the index of a token in
    the sequence. Tables of slots are padded on the right with slot 0.

    For example, the prompt `a b` has the completions `u v w` and `x`, and the prompt `c d e` has `y z`:

        slot                 0 1 2 3 4 5 6 7
        ids                  a b c d e u v y
        positions            0 1 0 1 2 2 3 3

        prompt_slots         0 1 .           a dot is padding, whose slot is 0
                             2 3 4
        completion_slots     5 6
                             . .             `x` is a last token
                             7 .
        context              0 1 . 5 6       the prompt, then the completion
                             0 1 . . .
                             2 3 4 7 .
        predecessors         1 5 6           `u` is predicted from `b`, `v` from `u`, `w` from `v`
                             1 . .
                             4 7 .
        prompt_entries       0 1 3 4 5       without the dot, which is entry 2
        completion_entries   0 1 4

    A completion may be a tree (`trees.py`). Its tokens have the same slots. Their positions, `visible` and
    `predecessors` follow the tree: a token attends to its ancestors and to itself.
    """

    ids: torch.Tensor
    """Token ids, shape (1, T)."""
    positions: torch.Tensor
    """Position of each token in its own row, shape (1, T)."""
    prompt_slots: torch.Tensor
    """Slots of the prompts' tokens, 0 for padding, shape (P, longest prompt)."""
    prompt_entries: torch.Tensor
    """Indices of the tokens in the flattened `prompt_slots`, shape (tokens of all prompts,)."""
    completion_slots: torch.Tensor
    """Slots of the completions' tokens, 0 for padding, shape (R, C). C is zero if no completion has more than one
    token."""
    completion_entries: torch.Tensor
    """Indices of the tokens in the flattened `completion_slots`, shape (tokens of all completions,)."""
    context: torch.Tensor
    """Slots that a completion attends to, those of its prompt and its own: shape (R, longest prompt + C)."""
    visible: torch.Tensor
    """Boolean mask, True where a token of a completion attends to an entry of `context`: shape (R, 1, C, longest prompt
    + C)."""
    predecessors: torch.Tensor
    """Slot of the token from which each completion token is predicted, shape (R, completion width)."""
    trees: Ancestry | None = None
    """Where the tokens of the first C columns are in their trees; None if no completion is a tree."""
    _biases: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, repr=False)
    _block_masks: list[BlockMask] = field(default_factory=list, repr=False)

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """Return `visible` as a mask to add to attention scores. One tensor serves all layers."""
        import torch

        if dtype not in self._biases:
            zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            self._biases[dtype] = zeros.masked_fill_(~self.visible, torch.finfo(dtype).min)
        return self._biases[dtype]

    def block_mask(self) -> BlockMask:
        """Return what attends to what in the sequence, as FlexAttention takes it. One mask serves all layers."""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask

        if self._block_masks:
            return self._block_masks[0]

        # A prompt has the number of its first slot, a completion that of its row. Tokens of prompts have no row.
        prompts = self.prompt_entries // self.prompt_slots.shape[1]
        rows = self.completion_entries // max(1, self.completion_slots.shape[1])
        prompt_of_slot = torch.cat([self.prompt_slots[prompts, 0], self.context[rows, 0]])
        row_of_slot = torch.cat([torch.full_like(prompts, -1), rows])

        def is_visible(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            is_same_prompt = prompt_of_slot[query] == prompt_of_slot[key]
            is_prompt_or_same_row = (row_of_slot[key] == -1) | (row_of_slot[key] == row_of_slot[query])
            return is_same_prompt & is_prompt_or_same_row & (key <= query)  # slots of a row are in its order

        visibility: Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor] = is_visible
        if self.trees is not None:
            visibility = self._visibility_in(self.trees, prompt_of_slot, row_of_slot)
        length = self.ids.shape[1]
        self._block_masks.append(create_block_mask(visibility, None, None, length, length, device=self.ids.device))
        return self._block_masks[0]

    def _visibility_in(
        self, trees: Ancestry, prompt_of_slot: torch.Tensor, row_of_slot: torch.Tensor
    ) -> Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return the function of two slots that says whether one attends to the other, if completions are trees.

        Args:
            prompt_of_slot: first slot of the prompt of each slot, shape (T,).
            row_of_slot: row of each slot, -1 for prompts, shape (T,).
        """
        import torch

        # Tokens of prompts have no numbers in a tree.
        prompt_columns = self.prompt_entries % self.prompt_slots.shape[1]
        no_numbers = torch.full_like(prompt_columns, -1)
        entries = self.completion_entries
        num_prompt_tokens = torch.cat([prompt_columns + 1, trees.num_prompt_tokens.flatten()[entries]])
        numbers = torch.cat([no_numbers, trees.numbers.flatten()[entries]])
        ends = torch.cat([no_numbers, trees.ends.flatten()[entries]])

        def is_visible(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            is_same_prompt = prompt_of_slot[query] == prompt_of_slot[key]
            column_in_prompt = key - prompt_of_slot[key]
            is_prompt_of_path = (row_of_slot[key] == -1) & (column_in_prompt < num_prompt_tokens[query])
            is_same_row = row_of_slot[key] == row_of_slot[query]
            is_ancestor = is_same_row & (numbers[key] <= numbers[query]) & (numbers[query] < ends[key])
            return is_same_prompt & (is_prompt_of_path | is_ancestor)

        return is_visible


def can_pack(ids: torch.Tensor, mask: torch.Tensor, completion_width: int) -> bool:
    """Return whether rows are prompts padded on the left and completions padded on the right, as TRL's are.

    Args:
        ids: token ids, shape (R, prompt width + completion width).
        mask: 1 for tokens and 0 for padding, of the same shape.
        completion_width: number of columns of the completions.
    """
    prompt_mask = mask[:, :-completion_width]
    completion_mask = mask[:, -completion_width:]
    if not prompt_mask.shape[1]:
        return False
    # Along a row, the mask of a prompt rises once, to 1 in its last column. The mask of a completion falls once.
    prompts_are_left_padded = (prompt_mask.diff(dim=1) >= 0).all() & prompt_mask[:, -1].all()
    completions_are_right_padded = (completion_mask.diff(dim=1) <= 0).all()
    return bool(prompts_are_left_padded & completions_are_right_padded)


def pack(
    ids: torch.Tensor, mask: torch.Tensor, completion_width: int, predecessors: torch.Tensor | None = None
) -> Packing:
    """Pack rows of left-padded prompts and right-padded completions. Letters in shapes are those of `Packing`.

    Args:
        ids: token ids, shape (R, prompt width + completion width).
        mask: 1 for tokens and 0 for padding, of the same shape.
        completion_width: number of columns of the completions.
        predecessors: the column before each completion token, as in `rollouts/token_tree.py`, of shape (R,
            completion width); None if no completion is a tree.
    """
    import torch

    device = ids.device
    prompt_ids = ids[:, :-completion_width]
    prompt_mask = mask[:, :-completion_width].bool()
    completion_ids = ids[:, -completion_width:]
    completion_mask = mask[:, -completion_width:].bool()

    # Find the distinct prompts. Padding becomes -1, which is no token, so that rows are equal if their prompts are.
    padded_prompts = prompt_ids.masked_fill(~prompt_mask, -1)
    unique_prompts, prompt_of_row = torch.unique(padded_prompts, dim=0, return_inverse=True)  # (P, prompt width), (R,)
    is_prompt_token = unique_prompts >= 0
    prompt_lengths = is_prompt_token.sum(1)  # (P,)
    longest_prompt = int(prompt_lengths.max())
    num_prompt_tokens = int(prompt_lengths.sum())
    columns = torch.arange(max(longest_prompt, completion_width), device=device)

    # Number the slots: first the tokens of all prompts, prompt by prompt.
    prompt_columns = columns[:longest_prompt]
    in_prompt = prompt_columns < prompt_lengths[:, None]  # (P, longest prompt)
    prompt_slots = _number(in_prompt, first=0)

    # Then the tokens of all completions, each without its last one.
    completion_lengths = completion_mask.sum(1)  # (R,)
    longest_completion = int(completion_lengths.max())
    num_columns = max(0, longest_completion - 1)  # C
    completion_columns = columns[:num_columns]
    in_completion = completion_columns < completion_lengths[:, None] - 1  # (R, C)
    completion_slots = _number(in_completion, first=num_prompt_tokens)

    # Find what each token of a completion attends to, its position, and the slot from which it is predicted.
    prompt_lengths_of_rows = prompt_lengths[prompt_of_row][:, None]  # (R, 1)
    context = torch.cat([prompt_slots[prompt_of_row], completion_slots], dim=1)  # (R, longest prompt + C)
    predecessor_slots = torch.zeros_like(completion_mask, dtype=torch.long)
    if predecessors is None:
        trees = None
        # A token of a completion attends to its whole prompt, and to its completion up to itself.
        sees_prompt = in_prompt[prompt_of_row][:, None].expand(-1, num_columns, -1)  # (R, C, longest prompt)
        is_causal = completion_columns <= completion_columns[:, None]  # (C, C)
        sees_completion = is_causal.expand(len(ids), -1, -1)  # (R, C, C)

        # Positions count from the first token of a prompt, and go on in each of its completions.
        positions = completion_columns + prompt_lengths_of_rows  # (R, C)

        # The first token of a completion is predicted from the last one of its prompt, any other from the one before.
        last_of_prompt = prompt_slots.gather(1, prompt_lengths[:, None] - 1)[prompt_of_row]  # (R, 1)
        predecessor_slots[:, : num_columns + 1] = torch.cat([last_of_prompt, completion_slots], dim=1)
    else:
        trees = ancestry(predecessors[:, :num_columns], prompt_lengths_of_rows)
        sees_prompt = prompt_columns < trees.num_prompt_tokens[:, :, None]  # (R, C, longest prompt)
        numbers_of_queries = trees.numbers[:, :, None]
        sees_completion = trees.numbers[:, None] <= numbers_of_queries  # (R, C, C)
        sees_completion &= numbers_of_queries < trees.ends[:, None]
        positions = trees.positions

        # Look up the slot of the column before in `context`: completions begin after the longest prompt, and negative
        # columns count from the end of the row's own prompt. A token that begins a sequence gets slot 0. It is not
        # sampled, so nothing is computed from its logprob.
        columns_before = predecessors[:, : num_columns + 1]
        is_in_completion = columns_before >= 0
        entries = columns_before + torch.where(is_in_completion, longest_prompt, prompt_lengths_of_rows)
        slots = context.gather(1, entries.clamp(min=0))
        predecessor_slots[:, : num_columns + 1] = slots.masked_fill(entries < 0, 0)

    # Join the prompts and the completions, without padding.
    visible = torch.cat([sees_prompt, sees_completion], dim=2)[:, None]
    prompt_positions = prompt_columns.expand_as(in_prompt)[in_prompt]
    completion_positions = positions[in_completion]
    packed_prompt_ids = unique_prompts[is_prompt_token]
    packed_completion_ids = completion_ids[:, :num_columns][in_completion]
    return Packing(
        ids=torch.cat([packed_prompt_ids, packed_completion_ids])[None],
        positions=torch.cat([prompt_positions, completion_positions])[None],
        prompt_slots=prompt_slots,
        prompt_entries=in_prompt.flatten().nonzero().squeeze(1),
        completion_slots=completion_slots,
        completion_entries=in_completion.flatten().nonzero().squeeze(1),
        context=context,
        visible=visible,
        predecessors=predecessor_slots,
        trees=trees,
    )


def _number(is_token: torch.Tensor, first: int) -> torch.Tensor:
    """Number the tokens row by row, from `first`. Entries that are no tokens get 0."""
    numbers = is_token.flatten().cumsum(0).view(is_token.shape) - 1 + first
    return numbers.masked_fill(~is_token, 0)
