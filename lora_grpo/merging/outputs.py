"""One tensor of the merged model: its base weight, the adapter's change, and the arithmetic in blocks of rows.

All values are computed in float32 (the DoRA factor in float64) and rounded once, when they are written.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from lora_grpo.files import StoredTensor


@dataclass(frozen=True)
class LowRank:
    """The update scale * B @ A, with A of (r, in) and B of (out, r)."""

    a: StoredTensor
    b: StoredTensor
    scale: float
    transposed: bool
    """Whether the weight is stored as (in, out), as in embeddings and GPT-2's Conv1D."""
    magnitude: StoredTensor | None = None
    """DoRA's norms, one per output feature."""


@dataclass(frozen=True, eq=False)
class Output:
    """One tensor of the merged model."""

    name: str
    base: StoredTensor
    low_rank: LowRank | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def rows(self, start: int, stop: int) -> Any:
        """Return merged rows in float32, as the unmerged adapter computes them."""
        rows = self.base.rows(start, stop).float()
        if self.low_rank:
            _update(self).add_to(rows, start, stop)
        return rows

    def rows_and_change(self, start: int, stop: int) -> tuple[Any, Any, Any]:
        """Return merged rows, base rows, and the adapter's change in float32. The output must have a low-rank update.

        The change from LoRA is scale * B @ A itself, not the difference of two large numbers.
        """
        base = self.base.rows(start, stop).float()
        change = _update(self).rows(start, stop, base)
        return base + change, base, change


@functools.lru_cache(maxsize=1)  # tensors are processed one at a time
def _update(output: Output) -> _Update:
    return _Update(output)


class _Update:
    """The LoRA or DoRA change of a weight."""

    def __init__(self, output: Output) -> None:
        low_rank = output.low_rank
        assert low_rank is not None
        a, b = (tensor.read().float() for tensor in (low_rank.a, low_rank.b))
        left, right = (a.T.contiguous(), b.T.contiguous()) if low_rank.transposed else (b, a)
        self._left, self._right = left * low_rank.scale, right  # (rows, r) and (r, columns) of the stored weight
        self._magnitude = low_rank.magnitude.read().double().reshape(-1) if low_rank.magnitude else None

    def add_to(self, weight: Any, start: int, stop: int) -> None:
        """Add the change of the given rows to `weight`, their values in float32."""
        if self._magnitude is None:
            weight.addmm_(self._left[start:stop], self._right)
        else:
            weight += self.rows(start, stop, weight)

    def rows(self, start: int, stop: int, weight: Any) -> Any:
        """Return the change of the given rows. `weight` has their values in float32."""
        change = self._left[start:stop] @ self._right
        if self._magnitude is None:
            return change
        weight, change = weight.double(), change.double()
        factor = (self._magnitude[start:stop] / (weight + change).norm(dim=1)).unsqueeze(1)
        return ((factor - 1) * weight + factor * change).float()
