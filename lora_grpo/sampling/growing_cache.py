"""A key-value cache that is not copied for every token, nor when completions leave the batch.

transformers' `DynamicCache` allocates a new tensor for each token and layer. Here, the keys and values of a layer have
spare columns on the right, so that a new token is written in place.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lora_grpo.models import base_of

if TYPE_CHECKING:
    import torch

SPARE_COLUMNS = 32
"""Number of later tokens for which there is space when a cache is copied."""


def has_full_attention(config: Any) -> bool:
    """Return whether all layers of a model attend to all earlier tokens.

    Only then can rows be padded on the left, so that completions of different lengths can join a running batch.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def cache_argument(model: Any) -> str:
    """Return the name under which a model takes its cache, and under which its output has it.

    transformers 5.24 renamed `past_key_values` to `cache`, and warns of the old name.
    """
    return _cache_argument(type(base_of(model)))  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _cache_argument(model_class: type) -> str:
    arguments = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return "cache" if "cache" in arguments else "past_key_values"


def new_cache(config: Any) -> Any:
    """Return an empty DynamicCache, of growing layers if all layers of the model have full attention."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=config)
    if has_full_attention(config):
        # Created here, because transformers is imported only inside functions.
        growing_dynamic_layer = type("GrowingDynamicLayer", (GrowingLayer, DynamicLayer), {})
        cache.layers = [growing_dynamic_layer() for _ in cache.layers]
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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the (R, heads, T, width) keys and values of new tokens, and return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states
            self.values = value_states
            return self.keys, self.values
        num_new = key_states.shape[-2]
        if self._spare < num_new:
            self.concatenate([self], num_new=num_new)
        self._spare -= num_new
        self.keys = _append(self.keys, key_states)
        self.values = _append(self.values, value_states)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep the given rows, in this order. Only rows that move are copied, unless there are more than before."""
        import torch

        count = len(beam_idx)
        if count > len(self.keys):
            self.keys = self.keys[beam_idx]
            self.values = self.values[beam_idx]
            self._spare = 0
            return
        moved = (beam_idx != torch.arange(count, device=beam_idx.device)).nonzero().squeeze(1)
        for tensor in (self.keys, self.values):
            tensor[moved] = tensor[beam_idx[moved]]
        self.keys = self.keys[:count]
        self.values = self.values[:count]

    def copy_row(self, row: int, columns: torch.Tensor) -> GrowingLayer:
        """Return a layer with copies of some columns of one row."""
        layer = copy.copy(self)
        layer.keys = self.keys[row : row + 1].index_select(2, columns)
        layer.values = self.values[row : row + 1].index_select(2, columns)
        layer._spare = 0
        return layer

    def drop_left(self, columns: int) -> None:
        """Leave out columns on the left, without a copy."""
        self.keys = self.keys[:, :, columns:]
        self.values = self.values[:, :, columns:]

    def concatenate(self, layers: Sequence[GrowingLayer], num_new: int = 0) -> None:
        """Take copies of the rows of some layers, with space for `num_new` tokens now and some later."""
        self._spare = num_new + SPARE_COLUMNS
        self.keys = _with_spare_columns([layer.keys for layer in layers], self._spare)
        self.values = _with_spare_columns([layer.values for layer in layers], self._spare)


def _with_spare_columns(parts: Sequence[torch.Tensor], spare: int) -> torch.Tensor:
    """Return a copy of the rows of all (R, heads, L, width) parts. Shorter rows are padded on the left.

    The result is a view of the used columns of a tensor with `spare` more.
    """
    from torch.nn.functional import pad

    _, heads, _, width = parts[0].shape
    num_rows = sum(len(part) for part in parts)
    length = max(part.shape[2] for part in parts)
    buffer = parts[0].new_empty(num_rows, heads, length + spare, width)
    start = 0
    for part in parts:
        # Zeros instead of uninitialized memory, because zero attention to NaN is NaN.
        buffer[start : start + len(part), :, :length] = pad(part, (0, 0, length - part.shape[2], 0))
        start += len(part)
    return buffer[:, :, :length]


def _append(used: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Write new columns into the spare ones, and return a view that includes them."""
    rows, heads, length, width = used.shape
    # The spare columns are in the same storage, behind those of the view.
    longer = used.as_strided((rows, heads, length + new.shape[2], width), used.stride())
    longer[:, :, length:] = new
    return longer
