"""Continuous batching: finished completions leave the batch, and waiting ones join it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_grpo.sampling.growing_cache import growing_cache

if TYPE_CHECKING:
    import torch

START_SHARE = 1 / 4
"""Share of the batch that is refilled at once. Refilling runs a prefill and copies the whole cache, which takes as long
as several decoding steps. Waiting until a quarter is free leaves an eighth of the batch empty on average."""

_MIN_SAVED_TOKENS = 64
"""Fewest tokens for which a forward pass on the common tokens of all prompts takes less time than it saves."""


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
    """(R, L) 1 where the cache contains a token of the row, 0 for left padding."""
    cache: Any
    logits: torch.Tensor
    """(R, V) logits of the next token."""

    def __len__(self) -> int:
        return len(self.indices)

    def advance(self, model: Any, tokens: torch.Tensor, running: torch.Tensor) -> None:
        """Remove rows that are not in `running`, and run the model on the newest of the (R,) `tokens` of the others."""
        import torch

        if len(running) < len(self):
            running = _fill_gaps(running)
            tokens, self.indices, self.steps = tokens[running], self.indices[running], self.steps[running]
            self.positions, self.mask = self.positions[running], self.mask[running]
            self.cache.reorder_cache(running)
        self.positions = self.positions + 1
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self), 1)], dim=1)
        if len(self):
            self.logits = model(
                input_ids=tokens[:, None],
                attention_mask=self.mask,
                position_ids=self.positions[:, None],
                past_key_values=self.cache,
                use_cache=True,
            ).logits[:, -1]

    def trim(self) -> None:
        """Remove left columns that no row uses, so that the cache is as long as its longest row. See `can_join`."""
        if unused := int(self.mask.any(dim=0).int().argmax()):
            self.mask = self.mask[:, unused:]
            for layer in self.cache.layers:
                layer.trim(unused)

    def joined(self, new: Batch) -> Batch:
        """Return a batch of these rows followed by the new rows, in the same cache. See `can_join`."""
        import torch
        from torch.nn.functional import pad

        length = max(self.mask.shape[1], new.mask.shape[1])
        masks = [pad(batch.mask, (length - batch.mask.shape[1], 0)) for batch in (self, new)]
        # Copy and free layer by layer, so that only one layer exists twice.
        for layer, other in zip(self.cache.layers, new.cache.layers, strict=True):
            layer.join(other)
            other.keys = other.values = None
        return Batch(
            indices=torch.cat([self.indices, new.indices]),
            steps=torch.cat([self.steps, new.steps]),
            positions=torch.cat([self.positions, new.positions]),
            mask=torch.cat(masks),
            cache=self.cache,
            logits=torch.cat([self.logits, new.logits]),
        )


def read_common_tokens(model: Any, prompts: Sequence[list[int]]) -> Any:
    """Run the model once on the tokens that all prompts start with, such as a system prompt or worked examples.

    Return their cache, or None if they are few or cannot be read separately.
    """
    import torch

    low, high = min(prompts), max(prompts)
    common = next((number for number, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))
    common = min(common, min(map(len, prompts)) - 1)
    rope = getattr(model.config, "rope_parameters", None) or {}
    rotates_by_length = rope.get("rope_type") in ("dynamic", "longrope")  # of the longest sequence in a pass
    if common * (len(prompts) - 1) < _MIN_SAVED_TOKENS or rotates_by_length or not can_join(model.config):
        return None
    device = next(model.parameters()).device
    input_ids = torch.tensor([prompts[0][:common]], device=device)
    positions = torch.arange(common, device=device)[None]
    cache = growing_cache(model.config)
    model(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return cache


def prefill(
    model: Any, pad_token_id: int, prompts: Sequence[list[int]], indices: range, num_samples: int, common: Any = None
) -> Batch:
    """Run the model on the prompts of some completions, once per prompt.

    Args:
        model: a transformers model.
        pad_token_id: pads shorter prompts on the left, or after the common tokens.
        prompts: token ids of all B prompts.
        indices: the completions to start, out of all B·G.
        num_samples: G.
        common: result of `read_common_tokens`.
    """
    import torch
    from transformers import DynamicCache

    device = next(model.parameters()).device
    first = indices[0] // num_samples
    start = common.get_seq_length() if common else 0
    needed = [ids[start:] for ids in prompts[first : indices[-1] // num_samples + 1]]
    longest = max(map(len, needed))
    input_ids = torch.tensor([[pad_token_id] * (longest - len(ids)) + ids for ids in needed], device=device)
    mask = torch.tensor([[1] * start + [0] * (longest - len(ids)) + [1] * len(ids) for ids in needed], device=device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, start:]
    cache = growing_cache(model.config) if can_join(model.config) else DynamicCache(config=model.config)
    if common:
        for layer, shared in zip(cache.layers, common.layers, strict=True):
            layer.start_with(shared, len(needed))
    logits = model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    rows = torch.arange(indices.start, indices.stop, device=device)
    prompt = rows // num_samples - first
    cache.reorder_cache(prompt)  # one copy per sample; unlike batch_repeat_interleave, all layer types support it
    return Batch(rows, torch.zeros_like(rows), positions[prompt, -1], mask[prompt], cache, logits[prompt])


def _fill_gaps(running: torch.Tensor) -> torch.Tensor:
    """Reorder rows so that the last ones take the places of those that are missing, and the others stay in place."""
    import torch

    count = len(running)
    order = torch.arange(count, device=running.device)
    stay = running[running < count]
    gap = torch.ones_like(order, dtype=torch.bool).index_fill_(0, stay, False)
    order[gap] = running[len(stay) :]
    return order


def can_join(config: Any) -> bool:
    """Return whether completions can join a running batch. Only full attention supports left padding."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def num_to_start(batch_size: int, *, running: int, waiting: int, joining: bool) -> int:
    """Return how many completions to start now: `START_SHARE` of the batch once it is free.

    Without `joining`, a full batch starts once all completions have finished.
    """
    if not joining:
        return 0 if running else min(batch_size, waiting)
    new = min(max(1, int(batch_size * START_SHARE)), waiting)
    return new if new <= batch_size - running else 0
