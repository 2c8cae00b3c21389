"""The arithmetic of a merge, a block of rows at a time.

Everything is computed in float32 (a DoRA factor in float64) and rounded once, to the dtype that is written.
"""

from __future__ import annotations

from typing import Any

from lora_grpo.files import row_blocks
from lora_grpo.merging.delta import Output


class MergedTensor:
    """One tensor of the merged model, before it is rounded.

    Args:
        output: what becomes of it. Its adapter matrices are read, its weight is not.
    """

    def __init__(self, output: Output) -> None:
        self.output = output
        self._update = _Update(output) if output.low_rank else None
        self._tokens: Any = output.tokens[0].read().float() if output.tokens else None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.output.shape

    def rows(self, start: int, stop: int) -> Any:
        """Return rows in float32, as the live adapter makes them."""
        rows = self.output.origin.rows(start, stop).float()
        if self._update:
            rows += self._update.rows(start, stop, rows)
        if self.output.bias:
            tensor, scale = self.output.bias
            rows += scale * tensor.rows(start, stop).float()
        if self.output.tokens:
            for place, token in enumerate(self.output.tokens[1]):
                if start <= token < stop:
                    rows[token - start] = self._tokens[place]
        return rows

    def rows_and_change(self, start: int, stop: int) -> tuple[Any, Any, Any]:
        """Return merged rows, the base's, and the adapter's change, all in float32; shapes must be the base's.

        The change of a LoRA update is B·A itself, not the difference of two large numbers.
        """
        output = self.output
        assert output.base is not None and output.base.shape == output.shape
        base = output.base.rows(start, stop).float()
        if self._update and not output.tokens and not output.replacement:
            change = self._update.rows(start, stop, base)
            return base + change, base, change
        merged = self.rows(start, stop)
        return merged, base, merged - base


class _Update:
    """scale · B·A, or DoRA's change, by rows of the weight as it is stored."""

    def __init__(self, output: Output) -> None:
        low_rank = output.low_rank
        assert low_rank is not None
        a, b = low_rank.a.read().float(), low_rank.b.read().float()
        # (rows, r) and (r, columns) of the stored weight
        left, self._right = (a.T.contiguous(), b.T.contiguous()) if low_rank.transposed else (b, a)
        self._left = left * low_rank.scale
        self._transposed = low_rank.transposed
        self._magnitude: Any = None
        self._factor: Any = None
        if low_rank.magnitude is not None:
            self._magnitude = low_rank.magnitude.read().double().reshape(-1)
            if self._transposed:  # the norms run over all rows, so they come first
                self._factor = self._magnitude / self._column_norms(output)

    def rows(self, start: int, stop: int, weight: Any) -> Any:
        """Return the change of rows whose weight, in float32, is given."""
        change = self._left[start:stop] @ self._right
        if self._magnitude is None:
            return change
        weight, change = weight.double(), change.double()
        if self._transposed:
            factor = self._factor
        else:
            factor = (self._magnitude[start:stop] / (weight + change).norm(dim=1)).unsqueeze(1)
        return ((factor - 1) * weight + factor * change).float()

    def _column_norms(self, output: Output) -> Any:
        squares: Any = 0
        for start, stop in row_blocks(output.shape):
            change = self._left[start:stop] @ self._right
            squares = squares + (output.origin.rows(start, stop).double() + change).square().sum(dim=0)
        return squares.sqrt()


def is_finite(rows: Any) -> bool:
    """Whether no element is NaN or infinite; an order of magnitude faster than asking each."""
    low, high = rows.aminmax()
    return bool(low.isfinite() and high.isfinite())
