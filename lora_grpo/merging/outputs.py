"""One tensor of the merged model: its base weight, the adapter's change, and the arithmetic in blocks of rows.

Every row of a merged weight needs the same row of the base and of one factor of the change, so a merge needs the
memory of a block of rows and not that of a model. All values are computed in float32 (the DoRA factor in float64) and
rounded once, when they are written.
"""

import functools
from dataclasses import dataclass
from typing import Any

from lora_grpo.files import StoredTensor


@dataclass(frozen=True)
class LowRank:
    """The change of a linear layer's weight, scale * B @ A, or that of an embedding, scale * (B @ A).T."""

    a: StoredTensor
    """lora_A, (r, in)."""
    b: StoredTensor
    """lora_B, (out, r)."""
    scale: float
    transposed: bool
    """Whether the weight is stored as (in, out), as in embeddings, and not as (out, in)."""
    magnitude: StoredTensor | None = None
    """DoRA's norms, one per output feature."""

    def change(self, start: int, stop: int, weight: Any) -> Any:
        """Return the change of rows `start` to `stop` in float32.

        For LoRA, this is scale * B @ A itself, not the difference of two large numbers. DoRA gives each row of
        W + D, with D = scale * B @ A, the norm m that it has learned (arXiv:2402.09353):

            change = m * (W + D) / |W + D| - W = (f - 1) * W + f * D    with f = m / |W + D|

        Args:
            start: the first row.
            stop: the row after the last.
            weight: the base's values W of these rows, (stop - start, columns).
        """
        left, right, magnitude = _factors(self)
        change = left[start:stop] @ right  # (stop - start, r) @ (r, columns)
        if magnitude is None:
            return change
        weight = weight.double()
        change = change.double()
        norms = (weight + change).norm(dim=1)  # (stop - start,)
        factor = (magnitude[start:stop] / norms).unsqueeze(1)
        return ((factor - 1) * weight + factor * change).float()


@functools.lru_cache(maxsize=1)  # tensors are processed one at a time
def _factors(update: LowRank) -> tuple[Any, Any, Any]:
    """Return the factors of the stored weight's change, (rows, r) and (r, columns), and DoRA's norms, (rows,) or None.

    For an embedding, (B @ A).T = A.T @ B.T.
    """
    a = update.a.read().float()
    b = update.b.read().float()
    if update.transposed:
        left = a.T.contiguous()
        right = b.T.contiguous()
    else:
        left = b
        right = a
    magnitude = update.magnitude.read().double().reshape(-1) if update.magnitude else None
    return left * update.scale, right, magnitude


@dataclass(frozen=True, eq=False)
class Output:
    """One tensor of the merged model."""

    name: str
    base: StoredTensor
    low_rank: LowRank | None = None
    """The adapter's change; None for a tensor that stays as it is."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def rows(self, start: int, stop: int) -> Any:
        """Return merged rows in float32, as the unmerged adapter computes them."""
        rows = self.base.rows(start, stop).float()
        if self.low_rank is None:
            return rows
        return rows + self.low_rank.change(start, stop, rows)
