"""Completions that are trees: episodes whose model calls do not simply extend each other.

`rollouts/token_tree.py` describes how a tree becomes a row, and `predecessors`: the column before each token of a
completion. TRL treats the row like any other: an episode is one completion with one advantage, the loss is on its
sampled tokens, and a normalizer counts them once, no matter how many calls have read them. An advantage of zero leaves
out all calls of an episode. The KL term and the comparison with the sampler take each sampled token in the context of
its own call.

The model reads a tree in one of two ways. Packed, all tokens are read once, and attend to their ancestors. If a model
cannot pack, each path from a root to a leaf is a row of its own, which takes the time and the memory of all paths.
Either way, a token is scored once. A token that begins a sequence has no logprob. What stands in its place is not used,
because the token is not sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_grpo.rollouts import ROOT

if TYPE_CHECKING:
    import torch


def has_trees(predecessors: torch.Tensor, completion_mask: torch.Tensor) -> bool:
    """Return whether any of R completions is a tree, and not simply one token after the other.

    Args:
        predecessors: the column before each token, shape (R, completion width).
        completion_mask: 1 for tokens and 0 for padding, of the same shape.
    """
    import torch

    columns = torch.arange(predecessors.shape[1], device=predecessors.device)
    is_after_other_column = predecessors != columns - 1
    return bool((is_after_other_column & completion_mask.bool()).any())


@dataclass(frozen=True)
class Ancestry:
    """Where the tokens of R completions of C columns are in their trees.

    The tokens of a tree are numbered so that the descendants of a token have the numbers after its own. All values are
    of shape (R, C).
    """

    num_prompt_tokens: torch.Tensor
    """How many tokens of the prompt, from its first, are ancestors of a token."""
    positions: torch.Tensor
    """Number of ancestors of a token."""
    numbers: torch.Tensor
    """The token's number."""
    ends: torch.Tensor
    """One more than the largest number of the token's descendants, or than its own if it has none."""


def ancestry(predecessors: torch.Tensor, prompt_lengths: torch.Tensor) -> Ancestry:
    """Return where tokens are in their trees.

    Args:
        predecessors: the column before each token, shape (R, C). Padding may have any column that is before its own.
        prompt_lengths: number of tokens of each prompt, shape (R, 1).
    """
    import torch

    rows = []
    for columns_before, [prompt_length] in zip(predecessors.tolist(), prompt_lengths.tolist(), strict=True):
        # Count each token and its descendants, from the last column, because a token is after its ancestors.
        num_columns = len(columns_before)
        subtree_sizes = [1] * num_columns
        for column in reversed(range(num_columns)):
            column_before = columns_before[column]
            if column_before >= 0:
                subtree_sizes[column_before] += subtree_sizes[column]

        # Number the tokens. A child's numbers begin after those of its elder siblings and their descendants.
        num_prompt_tokens: list[int] = []
        positions: list[int] = []
        numbers: list[int] = []
        next_numbers: list[int] = []  # for the next child of each token
        next_number_at_top = 0  # for the next token whose predecessor is no token of the completion
        for column, column_before in enumerate(columns_before):
            if column_before >= 0:  # another token of the completion
                num_prompt_tokens.append(num_prompt_tokens[column_before])
                positions.append(positions[column_before] + 1)
                number = next_numbers[column_before]
                next_numbers[column_before] += subtree_sizes[column]
            else:  # a token of the prompt, or none
                num_prompt_ancestors = 0
                if column_before != ROOT:
                    num_prompt_ancestors = prompt_length + column_before + 1
                num_prompt_tokens.append(num_prompt_ancestors)
                positions.append(num_prompt_ancestors)
                number = next_number_at_top
                next_number_at_top += subtree_sizes[column]
            numbers.append(number)
            next_numbers.append(number + 1)
        ends = [number + size for number, size in zip(numbers, subtree_sizes, strict=True)]
        rows.append([num_prompt_tokens, positions, numbers, ends])

    table = torch.tensor(rows, dtype=torch.long, device=predecessors.device)  # (R, 4, C)
    return Ancestry(*table.unbind(1))


@dataclass(frozen=True)
class Paths:
    """The paths of trees as S plain rows: each is a path from a root to a leaf.

    The completion of a path is what no earlier path has, and its prompt is what is before that. So each token of a tree
    is in the completion of one path, except for one that begins a sequence, which is in a prompt.
    """

    ids: torch.Tensor
    """Token ids, prompts padded on the left and completions padded on the right: (S, prompt width + path width)."""
    mask: torch.Tensor
    """1 for tokens and 0 for padding, of the same shape."""
    path_width: int
    """Number of columns of the paths' completions."""
    path_entries: torch.Tensor
    """Indices of the tokens of all completions in a flattened table (S, path width): shape (tokens,)."""
    tree_entries: torch.Tensor
    """Indices of the same tokens in a flattened table (R, completion width): shape (tokens,)."""

    def collect(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the values of the paths' tokens, shape (S, path width, ...), in the places that they have in trees.

        Args:
            shape: the first two sizes of the result, (R, completion width). Places of other tokens get 0.
        """
        size_of_value = values.shape[2:]
        zeros = values.new_zeros((shape.numel(), *size_of_value))
        of_tokens = values.flatten(0, 1)[self.path_entries]
        return zeros.index_copy(0, self.tree_entries, of_tokens).view(*shape, *size_of_value)


def paths_of(ids: torch.Tensor, mask: torch.Tensor, predecessors: torch.Tensor) -> Paths:
    """Return the paths of R rows, some of which are trees. A row without tokens in its completion is one path.

    Args:
        ids: token ids, prompts padded on the left and completions on the right: (R, prompt width + completion width).
        mask: 1 for tokens and 0 for padding, of the same shape.
        predecessors: the column before each completion token, shape (R, completion width).
    """
    import torch

    completion_width = predecessors.shape[1]
    prompt_width = ids.shape[1] - completion_width
    prompt_lengths = mask[:, :prompt_width].sum(1).tolist()
    completion_lengths = mask[:, prompt_width:].sum(1).tolist()

    # Collect the paths. Columns are counted from the first column of the completion, as in `predecessors`.
    rows: list[int] = []
    contexts: list[list[int]] = []
    completions: list[list[int]] = []
    for row, columns_before in enumerate(predecessors.tolist()):
        columns_before = columns_before[: completion_lengths[row]]
        first_column = -prompt_lengths[row]
        leaves = sorted(set(range(len(columns_before))) - set(columns_before))
        if not leaves:  # the completion is empty, so its path ends with the prompt
            leaves = [-1]
        is_scored = [False] * len(columns_before)
        for leaf in leaves:
            # From the leaf up to what an earlier path has scored: the completion of this path.
            new_columns = []
            column = leaf
            while column >= 0 and not is_scored[column]:
                new_columns.append(column)
                is_scored[column] = True
                column = columns_before[column]
            new_columns.reverse()

            # From there up to the root, and on into the prompt: what the completion is read after.
            context = []
            while column >= 0:
                context.append(column)
                column = columns_before[column]
            context.reverse()
            if column != ROOT:
                context = [*range(first_column, column + 1), *context]
            if not context:  # the first token begins a sequence
                context = new_columns[:1]
                new_columns = new_columns[1:]

            rows.append(row)
            contexts.append(context)
            completions.append(new_columns)

    # Pad them, with a column that does not exist.
    context_width = max(len(context) for context in contexts)
    path_width = max(1, *(len(completion) for completion in completions))
    padding = -prompt_width - 1
    table = []
    for context, completion in zip(contexts, completions, strict=True):
        left_padding = [padding] * (context_width - len(context))
        right_padding = [padding] * (path_width - len(completion))
        table.append([*left_padding, *context, *completion, *right_padding])

    row_of_path = torch.tensor(rows, device=ids.device)[:, None]  # (S, 1)
    columns = torch.tensor(table, device=ids.device)  # (S, context width + path width)
    is_token = columns != padding
    path_ids = ids[row_of_path, (columns + prompt_width).clamp(min=0)]

    completion_columns = columns[:, context_width:]
    is_completion_token = is_token[:, context_width:]
    tree_entries = row_of_path * completion_width + completion_columns
    return Paths(
        ids=path_ids.masked_fill(~is_token, 0),
        mask=is_token.to(mask.dtype),
        path_width=path_width,
        path_entries=is_completion_token.flatten().nonzero().squeeze(1),
        tree_entries=tree_entries[is_completion_token],
    )
