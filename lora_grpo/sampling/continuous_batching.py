"""Continuous batching: finished completions leave the batch, and waiting ones join it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

START_SHARE = 1 / 4
"""Share of the batch that is refilled at once. Refilling runs a prefill and copies the whole cache, which takes as long
as several decoding steps. Waiting until a quarter is free leaves an eighth of the batch empty on average."""


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
            for layer in self.cache.layers:  # views; the next step copies the cache anyway
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]

    def joined(self, new: Batch) -> Batch:
        """Return a batch of these rows followed by the new rows, in the same cache. See `can_join`."""
        import torch
        from torch.nn.functional import pad

        length = max(self.mask.shape[1], new.mask.shape[1])

        def both(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            """Pad the shorter tensor on the left. Shapes: (R, L) masks, or (R, heads, L, width) keys and values."""
            axis, after = (-1, ()) if old.dim() == 2 else (-2, (0, 0))
            return torch.cat([pad(part, (*after, length - part.shape[axis], 0)) for part in (old, new)])

        # Copy and free layer by layer, so that only one layer exists twice.
        for layer, other in zip(self.cache.layers, new.cache.layers, strict=True):
            layer.keys, other.keys = both(layer.keys, other.keys), None
            layer.values, other.values = both(layer.values, other.values), None
        return Batch(
            indices=torch.cat([self.indices, new.indices]),
            steps=torch.cat([self.steps, new.steps]),
            positions=torch.cat([self.positions, new.positions]),
            mask=both(self.mask, new.mask),
            cache=self.cache,
            logits=torch.cat([self.logits, new.logits]),
        )


def prefill(model: Any, pad_token_id: int, prompts: Sequence[list[int]], indices: range, num_samples: int) -> Batch:
    """Run the model on the prompts of some completions, once per prompt.

    Args:
        model: a transformers model.
        pad_token_id: pads shorter prompts on the left.
        prompts: token ids of all B prompts.
        indices: the completions to start, out of all B·G.
        num_samples: G.
    """
    import torch
    from transformers import DynamicCache

    device = next(model.parameters()).device
    first = indices[0] // num_samples
    needed = prompts[first : indices[-1] // num_samples + 1]
    longest = max(map(len, needed))
    input_ids = torch.tensor([[pad_token_id] * (longest - len(ids)) + ids for ids in needed], device=device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in needed], device=device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
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
