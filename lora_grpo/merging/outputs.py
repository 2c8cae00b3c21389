"""One tensor of the merged model: its base weight, the adapter's change, and the arithmetic in blocks of rows.

All values are computed in float32 (the DoRA factor in float64) and rounded once, when they are written.
"""

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
    """Whether the weight is stored as (in, out), as in embeddings."""
    magnitude: StoredTensor | None = None
    """DoRA's norms, one per output feature."""

    def change(self, start: int, stop: int, weight: Any) -> Any:
        """Return the change of rows `start` to `stop` in float32. `weight` has the base's values of these rows.

        For LoRA, this is scale * B @ A itself, not the difference of two large numbers.
        """
        left, right, magnitude = _factors(self)
        change = left[start:stop] @ right
        if magnitude is None:
            return change
        weight, change = weight.double(), change.double()
        factor = (magnitude[start:stop] / (weight + change).norm(dim=1)).unsqueeze(1)
        return ((factor - 1) * weight + factor * change).float()


@functools.lru_cache(maxsize=1)  # tensors are processed one at a time
def _factors(update: LowRank) -> tuple[Any, Any, Any]:
    """Return the (rows, r) and (r, columns) factors of the stored weight's change, and DoRA's norms or None."""
    a, b = (tensor.read().float() for tensor in (update.a, update.b))
    left, right = (a.T.contiguous(), b.T.contiguous()) if update.transposed else (b, a)
    magnitude = update.magnitude.read().double().reshape(-1) if update.magnitude else None
    return left * update.scale, right, magnitude


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
        return rows + self.low_rank.change(start, stop, rows) if self.low_rank else rows
