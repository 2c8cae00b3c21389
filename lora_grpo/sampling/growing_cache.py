"""A key-value cache with spare columns, so that a decoding step writes its token and does not copy the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SPARE_COLUMNS = 32
"""Number of later tokens for which there is space when a cache is copied."""


def growing_cache(config: Any) -> Any:
    """Return an empty DynamicCache of growing layers, for a model whose layers all have full attention."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=config)
    layer = type("GrowingDynamicLayer", (GrowingLayer, DynamicLayer), {})
    cache.layers = [layer() for _ in cache.layers]
    return cache


class GrowingLayer:
    """The (R, heads, L, width) keys and values of one layer, as views of tensors with more columns on the right.

    Mixed into transformers' `DynamicLayer`, which copies the layer for every token, and when rows leave.
    """

    keys: torch.Tensor
    values: torch.Tensor
    is_initialized: bool
    lazy_initialization: Callable[..., None]
    _spare = 0
    """Number of columns on the right that are not used yet."""

    def start_with(self, other: GrowingLayer, count: int) -> None:
        """Fill an empty layer with `count` rows, each of which has the tokens of the only row of `other`."""
        self.lazy_initialization(other.keys, other.values)
        self.keys, self.values = (tensor.expand(count, -1, -1, -1) for tensor in (other.keys, other.values))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens, and return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        if self._spare < key_states.shape[-2]:
            self._copy([self], columns=key_states.shape[-2])
        self._spare -= key_states.shape[-2]
        self.keys, self.values = _append(self.keys, key_states), _append(self.values, value_states)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep the given rows, in this order. Only rows that move are copied, unless there are more than before."""
        import torch

        count = len(beam_idx)
        if count > len(self.keys):
            self.keys, self.values, self._spare = self.keys[beam_idx], self.values[beam_idx], 0
            return
        moved = (beam_idx != torch.arange(count, device=beam_idx.device)).nonzero().squeeze(1)
        for tensor in (self.keys, self.values):
            tensor[moved] = tensor[beam_idx[moved]]
        self.keys, self.values = self.keys[:count], self.values[:count]

    def trim(self, columns: int) -> None:
        """Remove the first columns."""
        self.keys, self.values = self.keys[:, :, columns:], self.values[:, :, columns:]

    def join(self, other: GrowingLayer) -> None:
        """Append the rows of another layer. The shorter ones are padded on the left."""
        self._copy([self, other])

    def _copy(self, layers: Sequence[GrowingLayer], columns: int = 0) -> None:
        """Copy the rows of some layers into new tensors with spare columns for these and for later tokens."""
        self._spare = columns + SPARE_COLUMNS
        self.keys = _with_spare_columns([layer.keys for layer in layers], self._spare)
        self.values = _with_spare_columns([layer.values for layer in layers], self._spare)


def _with_spare_columns(parts: Sequence[torch.Tensor], spare: int) -> torch.Tensor:
    from torch.nn.functional import pad

    _, heads, _, width = parts[0].shape
    length = max(part.shape[2] for part in parts)
    buffer = parts[0].new_empty(sum(map(len, parts)), heads, length + spare, width)
    start = 0
    for part in parts:
        # Zeros and not whatever is in memory, because zero attention to NaN is NaN.
        buffer[start : start + len(part), :, :length] = pad(part, (0, 0, length - part.shape[2], 0))
        start += len(part)
    return buffer[:, :, :length]


def _append(used: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Write new columns into the spare ones, and return a view that includes them."""
    rows, heads, length, width = used.shape
    longer = used.as_strided((rows, heads, length + new.shape[2], width), used.stride())
    longer[:, :, length:] = new
    return longer
