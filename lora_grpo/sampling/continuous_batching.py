"""Continuous batching: finished completions leave the batch, and waiting ones join it.

Shapes: R rows, the completions that are being decoded; L columns of the cache; V tokens of the vocabulary. All rows end
at the last column, behind which the next token is written. So shorter rows have padding on the left, which the mask
hides:

    row 0    . . . a b c d e        . padding (mask 0)
    row 1    a b c d e f g h        a cached token (mask 1)
    row 2    . . . . . a b c

Which completion a row decodes changes from step to step: `Batch.indices` has its index in the call.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_grpo.sampling import growing_cache

if TYPE_CHECKING:
    import torch

START_FRACTION = 1 / 4
"""Fraction of the batch that is refilled at once. Refilling runs a prefill and copies the cache, which takes as long
as several decoding steps. Waiting until a quarter is free leaves an eighth of the batch empty on average."""

_MIN_SAVED_TOKENS = 64
"""Minimum number of tokens for which a forward pass on the common tokens of all prompts saves time."""


@dataclass
class Batch:
    """R completions that are decoded together, with the state that their next tokens depend on."""

    indices: torch.Tensor
    """(R,) index of each completion in the call."""
    steps: torch.Tensor
    """(R,) number of tokens sampled so far."""
    positions: torch.Tensor
    """(R,) position of the newest token in its own sequence."""
    mask: torch.Tensor
    """(R, L) 1 where the cache contains a token of the row, 0 for padding."""
    cache: Any
    """Keys and values of L tokens per row; see `growing_cache.new_cache`."""
    logits: torch.Tensor
    """(R, V) logits of the next token."""

    def __len__(self) -> int:
        return len(self.indices)

    def advance(self, model: Any, tokens: torch.Tensor, running: torch.Tensor) -> None:
        """Remove the rows that have finished, and run the model on the newest tokens of the others.

        Args:
            tokens: (R,) the tokens that were just sampled.
            running: the rows that go on, in ascending order.
        """
        import torch

        if len(running) < len(self):
            running = _fill_gaps(running)  # so that the cache copies few rows
            tokens = tokens[running]
            self.indices = self.indices[running]
            self.steps = self.steps[running]
            self.positions = self.positions[running]
            self.mask = self.mask[running]
            self.cache.reorder_cache(running)

        # Each row gets one more column, for its newest token.
        self.positions = self.positions + 1
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self), 1)], dim=1)
        if len(self):
            self.logits = _forward(model, tokens[:, None], self.mask, self.positions[:, None], self.cache)

    def copy_row(self, row: int) -> Batch:
        """Return a batch with a copy of one row. It has no logits, because it reads more tokens first.

        At most half of its columns are padding, because its cache may be kept for long.
        """
        import torch

        mask = self.mask[row]
        columns = torch.arange(len(mask), device=mask.device)
        if 2 * int(mask.sum()) < len(mask):
            columns = mask.nonzero().squeeze(1)
        cache = copy.copy(self.cache)
        cache.layers = [layer.copy_row(row, columns) for layer in self.cache.layers]
        return Batch(
            indices=self.indices[row : row + 1],
            steps=self.steps[row : row + 1],
            positions=self.positions[row : row + 1],
            mask=mask[None, columns],
            cache=cache,
            logits=self.logits[:0],
        )

    @classmethod
    def continued(cls, batches: dict[int, Batch]) -> Batch:
        """Return one batch of the rows of earlier batches, which are consumed.

        Args:
            batches: a batch of one row for each index in the call.
        """
        import torch

        joined, *others = batches.values()
        joined.join(*others)
        joined.indices = torch.tensor(list(batches), device=joined.mask.device)
        return joined

    def read(self, model: Any, prompts: Sequence[list[int]], pad_token_id: int) -> None:
        """Run the model on the tokens of the prompts that are not in the cache. There is a prompt for each index.

        Shorter rows get columns of padding between their earlier tokens and the new ones.
        """
        import torch

        nums_cached = (self.positions + 1).tolist()
        new_tokens = []
        for index, num_cached in zip(self.indices.tolist(), nums_cached, strict=True):
            new_tokens.append(prompts[index][num_cached:])
        input_ids, is_new = _pad_left(new_tokens, pad_token_id, self.mask.device)  # (R, T) each
        positions = self.positions[:, None] + is_new.cumsum(dim=1)
        self.mask = torch.cat([self.mask, is_new], dim=1)
        self.logits = _forward(model, input_ids, self.mask, positions, self.cache, logits_to_keep=1)
        self.positions = positions[:, -1]
        self.steps = torch.zeros_like(self.indices)

    def trim(self) -> None:
        """Remove left columns that no row uses, so that the cache is as long as its longest row.

        For models with full attention only, as `join`; see `growing_cache.has_full_attention`.
        """
        is_used = self.mask.any(dim=0)  # (L,)
        num_unused = int(is_used.int().argmax())
        if num_unused:
            self.mask = self.mask[:, num_unused:]
            for layer in self.cache.layers:
                layer.drop_left(num_unused)

    def join(self, *others: Batch) -> None:
        """Append the rows of other batches, which are consumed. Shorter ones are padded on the left."""
        import torch
        from torch.nn.functional import pad

        batches = (self, *others)
        length = max(batch.mask.shape[1] for batch in batches)
        self.mask = torch.cat([pad(batch.mask, (length - batch.mask.shape[1], 0)) for batch in batches])
        # Copy and free layer by layer, so that only one layer exists twice.
        for layer_index, layer in enumerate(self.cache.layers):
            other_layers = [batch.cache.layers[layer_index] for batch in others]
            layer.concatenate([layer, *other_layers])
            for other_layer in other_layers:
                other_layer.keys = None
                other_layer.values = None
        self.indices = torch.cat([batch.indices for batch in batches])
        self.steps = torch.cat([batch.steps for batch in batches])
        self.positions = torch.cat([batch.positions for batch in batches])
        self.logits = torch.cat([batch.logits for batch in batches])


@dataclass(frozen=True)
class KeptCache:
    """The cache of a finished completion, which a later prompt may go on with."""

    token_ids: list[int]
    """The T tokens that it contains: the prompt and the completion without its last token, which was never read."""
    batch: Batch
    """A batch of this completion alone."""

    def begins(self, prompt: list[int]) -> bool:
        """Return whether a prompt goes on with these tokens."""
        num_tokens = len(self.token_ids)
        return len(prompt) > num_tokens and prompt[:num_tokens] == self.token_ids


def prefill(
    model: Any,
    pad_token_id: int,
    prompts: Sequence[list[int]],
    indices: Sequence[int],
    common_cache: Any = None,
) -> Batch:
    """Run the model on the prompts of some completions, and return a batch with a row for each.

    Equal prompts that follow each other are read once. Shorter prompts are padded on the left, or after the common
    tokens.

    Args:
        prompts: token ids of the prompts of all N completions of the call.
        indices: the R completions to start.
        common_cache: the cache of the tokens that all these prompts start with; see `read_common_tokens`.
    """
    import torch

    device = next(model.parameters()).device
    num_common = common_cache.get_seq_length() if common_cache else 0

    # P prompts, and the one of each completion.
    unique_prompts: list[list[int]] = []
    prompt_of_row = []
    for index in indices:
        if not unique_prompts or prompts[index] != unique_prompts[-1]:
            unique_prompts.append(prompts[index])
        prompt_of_row.append(len(unique_prompts) - 1)

    # The prompts without the common tokens.
    new_tokens = [ids[num_common:] for ids in unique_prompts]
    input_ids, is_new = _pad_left(new_tokens, pad_token_id, device)  # (P, T) each
    mask = torch.cat([is_new.new_ones(len(new_tokens), num_common), is_new], dim=1)  # (P, L)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, num_common:]  # (P, T)

    # Every prompt continues the same keys and values, without copies of them.
    cache = growing_cache.new_cache(model.config)
    if common_cache:
        for layer, common_layer in zip(cache.layers, common_cache.layers, strict=True):
            layer.lazy_initialization(common_layer.keys, common_layer.values)
            layer.keys = common_layer.keys.expand(len(new_tokens), -1, -1, -1)
            layer.values = common_layer.values.expand(len(new_tokens), -1, -1, -1)
    logits = _forward(model, input_ids, mask, positions, cache, logits_to_keep=1)  # (P, V)

    # From P prompts to R completions. Unlike batch_repeat_interleave, all layer types support reorder_cache.
    completions = torch.tensor(indices, device=device)  # (R,)
    prompt_rows = torch.tensor(prompt_of_row, device=device)  # (R,)
    cache.reorder_cache(prompt_rows)
    return Batch(
        indices=completions,
        steps=torch.zeros_like(completions),
        positions=positions[prompt_rows, -1],
        mask=mask[prompt_rows],
        cache=cache,
        logits=logits[prompt_rows],
    )


def read_common_tokens(model: Any, prompts: Sequence[list[int]]) -> Any:
    """Run the model once on the tokens that all prompts start with, such as a system prompt or worked examples.

    Return their cache, or None if they are few or cannot be read separately.

    Args:
        prompts: those of the completions in their order. Equal prompts that follow each other are read once anyway.
    """
    import torch

    prompts = [prompt for prompt, _ in itertools.groupby(prompts)]
    if not prompts:
        return None
    num_common = _common_length(prompts)
    saved_tokens = num_common * (len(prompts) - 1)
    if saved_tokens < _MIN_SAVED_TOKENS or not growing_cache.has_full_attention(model.config):
        return None
    # Dynamic and LongRoPE rotate by the length of the longest sequence of a pass, which would differ without the common
    # tokens.
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return None

    input_ids = torch.tensor([prompts[0][:num_common]], device=next(model.parameters()).device)  # (1, T)
    mask = torch.ones_like(input_ids)
    positions = mask.cumsum(dim=1) - 1
    cache = growing_cache.new_cache(model.config)
    _forward(model, input_ids, mask, positions, cache, logits_to_keep=1)
    return cache


def _common_length(prompts: Sequence[list[int]]) -> int:
    """Return the number of tokens that all prompts start with. Each prompt keeps at least one of its own."""
    # In the order of lists, all prompts are between the smallest and the largest, so they share what these two share.
    smallest = min(prompts)
    largest = max(prompts)
    length = 0
    longest_possible = min(len(ids) for ids in prompts) - 1
    while length < longest_possible and smallest[length] == largest[length]:
        length += 1
    return length


def _pad_left(sequences: Sequence[list[int]], pad_token_id: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (N, T) tokens of sequences, padded on the left, and (N, T) 1 for each token, 0 for padding."""
    import torch

    longest = max(len(ids) for ids in sequences)
    padded = [[pad_token_id] * (longest - len(ids)) + ids for ids in sequences]
    is_token = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in sequences]
    return torch.tensor(padded, device=device), torch.tensor(is_token, device=device)


def _forward(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any, **options: Any
) -> Any:
    """Run the model on new tokens, and extend the cache.

    Args:
        ids: (R, T) new tokens.
        mask: (R, L) for all tokens, the new ones included.
        positions: (R, T) of the new tokens in their sequences.
        options: further arguments of the model.

    Returns:
        (R, V) logits of the next tokens.
    """
    options[growing_cache.cache_argument(model)] = cache
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **options)
    return output.logits[:, -1]


def _fill_gaps(running: torch.Tensor) -> torch.Tensor:
    """Reorder N rows so that the last ones take the places of those that are missing, and the others stay in place.

    With rows 0, 3, 4 and 5, of six, the result is 0, 4, 5, 3: rows 4 and 5 move, 0 and 3 do not.
    """
    import torch

    count = len(running)
    order = torch.arange(count, device=running.device)
    stay = running[running < count]
    move = running[len(stay) :]  # `running` is in ascending order
    is_gap = torch.ones_like(order, dtype=torch.bool).index_fill_(0, stay, False)
    order[is_gap] = move
    return order


def num_to_start(batch_size: int, *, running: int, waiting: int, refills: bool) -> int:
    """Return how many completions to start now.

    Args:
        batch_size: maximum number of completions in the batch.
        running: number of completions in the batch.
        waiting: number of completions that have not started.
        refills: whether completions may join a running batch: `START_FRACTION` of it at once, when as many are free.
            Otherwise, a full batch starts when all have finished.
    """
    if not refills:
        if running:
            return 0
        return min(batch_size, waiting)
    refill_size = max(1, int(batch_size * START_FRACTION))
    num_new = min(refill_size, waiting)
    num_free = batch_size - running
    if num_new > num_free:
        return 0
    return num_new
