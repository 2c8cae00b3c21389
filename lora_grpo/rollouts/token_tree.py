"""An episode of several model calls as one row of tokens: a prompt, a completion, and what each token follows.

An agent may extend its history, rewrite it, summarize it, or ask the model about several things side by side. Its calls
then form a tree: two calls share the tokens at the beginning of their contexts, and go separate ways after that. In a
row, the tree is flattened. The context of the first call is the prompt. All other tokens are the completion, each once.

A token is named by its column, relative to the first token of the completion: 0, 1, 2, ... for the completion, and
..., -2, -1 for the prompt, whose last token is -1. For example, with capital letters for sampled tokens:

    call   context       sampled        column         0  1  2  3  4  5  6  7
    1      s a b         X Y            token_ids      X  Y  c  Z  d  W  t  V
    2      s a b X Y c   Z              loss_mask      1  1  0  1  0  1  0  1
    3      s a d         W              predecessors  -1  0  1  2 -2  4  R  6
    4      t             V                             R is ROOT: `t` begins a sequence of its own
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ROOT = -(2**31)
"""The predecessor of a token that begins a sequence: it has none."""


class ModelCall(NamedTuple):
    """What the model was asked in a call, and what it answered."""

    context_ids: list[int]
    """The tokens before the sampled ones."""
    token_ids: list[int]
    """The sampled tokens."""
    logprobs: list[float] | None
    """Of the sampled tokens, in nats; None if the sampler returns none."""


@dataclass(frozen=True)
class TreeRow:
    """An episode as a prompt and T tokens after it."""

    prompt_ids: list[int]
    """The context of the first call."""
    token_ids: list[int]
    """(T,) all other tokens."""
    loss_mask: list[int]
    """(T,) 1 for each token that the model sampled, 0 for others."""
    logprobs: list[float] | None
    """(T,) logprob of each sampled token in nats, 0 for others; None if those of any call are missing."""
    predecessors: list[int] | None
    """(T,) column of the token before each token; None if that is always the column before, as in a conversation whose
    every call extends the one before."""


def tree_row(calls: Sequence[tuple[list[int], list[int], list[float] | None]]) -> TreeRow:
    """Return the calls of an episode as one row.

    A call shares the beginning of its context with an earlier call: as many tokens as possible, of the earlier call's
    context or of its answer. It adds the rest of its context and all of its sampled tokens, even if another call has
    sampled the same ones.

    Args:
        calls: `ModelCall`s in the order in which the model answered, at least one, none with an empty context.
    """
    prompt_ids = list(calls[0][0])
    token_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] | None = []
    predecessors: list[int] = []

    # The columns that follow a column, by token. Sampled tokens that are equal are several columns.
    followers: dict[tuple[int, int], list[int]] = defaultdict(list)
    column_before = ROOT
    for column, token in enumerate(prompt_ids, start=-len(prompt_ids)):
        followers[column_before, token].append(column)
        column_before = column

    def append(token: int, column_before: int, *, is_sampled: bool) -> int:
        """Add a token to the completion, and return its column."""
        column = len(token_ids)
        token_ids.append(token)
        loss_mask.append(int(is_sampled))
        predecessors.append(column_before)
        followers[column_before, token].append(column)
        return column

    for context_ids, sampled_ids, sampled_logprobs in calls:
        # Follow the context as far as the row has it. Where equal tokens were sampled, there are several ways.
        ends = [ROOT]
        num_shared = 0
        for token in context_ids:
            longer_ends = [column for end in ends for column in followers.get((end, token), ())]
            if not longer_ends:
                break
            ends = longer_ends
            num_shared += 1

        column = ends[0]
        for token in context_ids[num_shared:]:
            column = append(token, column, is_sampled=False)
        for token in sampled_ids:
            column = append(token, column, is_sampled=True)

        if logprobs is None or sampled_logprobs is None:
            logprobs = None
        else:
            num_added = len(context_ids) - num_shared
            logprobs = [*logprobs, *[0.0] * num_added, *sampled_logprobs]

    is_linear = predecessors == list(range(-1, len(token_ids) - 1))
    return TreeRow(prompt_ids, token_ids, loss_mask, logprobs, None if is_linear else predecessors)
