"""The completions that are decoded together: how they begin, go on and make room for the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BEGUN_SHARE = 1 / 4
"""Of the slots, that are filled together.

Filling reads the new prompts and copies the whole cache, which takes as long as some steps of decoding, and it needs
memory in proportion; until a quarter is free, an eighth of the slots is empty on average.
"""


@dataclass
class Rows:
    """r completions that are decoded together, with all that their next tokens depend on."""

    places: torch.Tensor
    """(r,) the completion's place among all that the call was asked for."""
    steps: torch.Tensor
    """(r,) tokens drawn so far."""
    positions: torch.Tensor
    """(r,) position of the newest token in its own sequence."""
    mask: torch.Tensor
    """(r, L) 1 where the cache holds a token of the row, 0 to its left."""
    cache: Any
    logits: torch.Tensor
    """(r, V) of the next token."""

    def __len__(self) -> int:
        return len(self.places)

    def go_on(self, model: Any, tokens: torch.Tensor, running: torch.Tensor) -> None:
        """Drop the rows that have ended and read the newest token of the others.

        Args:
            model: a transformers model.
            tokens: (r,) what was drawn.
            running: indices of the rows that have not ended, in order.
        """
        import torch

        if len(running) < len(self):
            tokens, self.places, self.steps = tokens[running], self.places[running], self.steps[running]
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
        """Cut off the columns at the left that no row uses any more, so that the cache grows with its longest row.

        For models whose rows can be joined; see `can_join`.
        """
        if unused := int(self.mask.any(dim=0).int().argmax()):
            self.mask = self.mask[:, unused:]
            for layer in self.cache.layers:  # views; the next step copies the cache anyway
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]

    def joined(self, new: Rows) -> Rows:
        """Return these rows and the new ones after them, in this cache; `can_join` says for which models."""
        import torch
        from torch.nn.functional import pad

        length = max(self.mask.shape[1], new.mask.shape[1])

        def both(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            """Pad the shorter one on its left. Shapes: (r, L) of masks, or (r, heads, L, width) of keys and values."""
            axis, after = (-1, ()) if old.dim() == 2 else (-2, (0, 0))
            return torch.cat([pad(part, (*after, length - part.shape[axis], 0)) for part in (old, new)])

        # Layer by layer and letting go of the old, so that only one of them is there twice.
        for layer, other in zip(self.cache.layers, new.cache.layers, strict=True):
            layer.keys, other.keys = both(layer.keys, other.keys), None
            layer.values, other.values = both(layer.values, other.values), None
        return Rows(
            places=torch.cat([self.places, new.places]),
            steps=torch.cat([self.steps, new.steps]),
            positions=torch.cat([self.positions, new.positions]),
            mask=both(self.mask, new.mask),
            cache=self.cache,
            logits=torch.cat([self.logits, new.logits]),
        )


def begin(model: Any, pad_token_id: int, prompts: Sequence[list[int]], places: range, num_samples: int) -> Rows:
    """Read the prompts of some completions, each prompt once.

    Args:
        model: a transformers model.
        pad_token_id: fills the left of shorter prompts.
        prompts: token ids of all B prompts of the call.
        places: which of the call's B·G completions begin.
        num_samples: G completions of each prompt.
    """
    import torch
    from transformers import DynamicCache

    device = next(model.parameters()).device
    first = places[0] // num_samples
    needed = prompts[first : places[-1] // num_samples + 1]
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
    places_ = torch.arange(places.start, places.stop, device=device)
    prompt = places_ // num_samples - first
    cache.reorder_cache(prompt)  # a copy for each sample; unlike batch_repeat_interleave every kind of layer has it
    return Rows(places_, torch.zeros_like(places_), positions[prompt, -1], mask[prompt], cache, logits[prompt])


def can_join(config: Any) -> bool:
    """Return whether completions of this model may join others that are under way.

    A sliding window or a recurrent state cannot be padded to the length of another row's; full attention's can.

    Args:
        config: the model's configuration.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def to_begin(slots: int, *, running: int, waiting: int, joining: bool) -> int:
    """Return how many completions begin now: a share of the slots when it is free, or all when all have ended."""
    if not joining:
        return 0 if running else min(slots, waiting)
    new = min(max(1, int(slots * BEGUN_SHARE)), waiting)
    return new if new <= slots - running else 0
