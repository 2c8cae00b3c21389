"""One tensor of a merged model: where it comes from, and what an adapter does to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from lora_grpo.files import StoredTensor


class Tensor(Protocol):
    """A tensor that can be read by rows, wherever it comes from."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def rows(self, start: int, stop: int) -> Any: ...
    def read(self) -> Any: ...


@dataclass(frozen=True)
class LowRank:
    """The update scale · B·A, of rank r."""

    a: StoredTensor
    """(r, in)."""
    b: StoredTensor
    """(out, r)."""
    scale: float
    transposed: bool
    """The weight is kept as (in, out): embeddings, and GPT-2's Conv1D."""
    magnitude: StoredTensor | None = None
    """DoRA's norms, one for each output feature."""


@dataclass(frozen=True)
class Output:
    """One tensor of the merged model."""

    name: str
    base: Tensor | None
    """What it was; None for one that the adapter brings along."""
    low_rank: LowRank | None = None
    bias: tuple[StoredTensor, float] | None = None
    """What is added to a bias, and its scale."""
    tokens: tuple[StoredTensor, tuple[int, ...]] | None = None
    """Rows, and where they go."""
    replacement: StoredTensor | None = None
    """The whole tensor, as it was trained."""

    @property
    def origin(self) -> Tensor:
        """What the updates are added to."""
        tensor = self.replacement or self.base
        assert tensor is not None
        return tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.origin.shape

    @property
    def changed(self) -> bool:
        return any(part is not None for part in (self.low_rank, self.bias, self.tokens, self.replacement))
