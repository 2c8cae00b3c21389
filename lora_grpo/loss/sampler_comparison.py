"""How the sampler's logprobs differ from those of the loss, over the micro-batches of a step and all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lora_grpo.loss.micro_batch import MicroBatch

if TYPE_CHECKING:
    import torch

Gather = Callable[["torch.Tensor"], "torch.Tensor"]
"""Returns the tensors of all processes, concatenated."""


@dataclass(frozen=True)
class Spread:
    """The smallest, the mean and the largest of some values."""

    smallest: float
    mean: float
    largest: float


@dataclass
class SamplerComparison:
    """Collects what the micro-batches of a step say about the sampler.

    They cover the completions that the loss pass reads: not those that it skips because their advantage is zero. Of a
    step without any advantage, it reads one.
    """

    _differences: list[torch.Tensor] = field(default_factory=list)
    """Absolute differences of each micro-batch in nats, shape (tokens,)."""
    _weights: list[torch.Tensor] = field(default_factory=list)
    """Importance weights of each micro-batch, shape (tokens,), or (completions,) if completions have one weight."""

    def add(self, micro_batch: MicroBatch) -> None:
        """Add a micro-batch whose loss has been computed."""
        differences = micro_batch.sampler_differences()
        if differences is not None:
            self._differences.append(differences)
        weights = micro_batch.importance_weights()
        if weights is not None:
            self._weights.append(weights)

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch of the step has said anything yet."""
        return not self._differences

    def differences(self, gather: Gather) -> Spread | None:
        """Return the absolute differences of the logprobs in nats per token, or None without any. Forget them."""
        return _spread(self._differences, gather)

    def weights(self, gather: Gather) -> Spread | None:
        """Return the importance weights, or None without any. Forget them."""
        return _spread(self._weights, gather)


def _spread(parts: list[torch.Tensor], gather: Gather) -> Spread | None:
    """Return the spread of the values of all processes, or None without any. Empty the list."""
    import torch

    if not parts:
        return None
    values = torch.cat(parts)
    parts.clear()

    # A process without values still takes part in `gather`. Infinities change neither minimum nor maximum.
    count = values.new_tensor(len(values))
    smallest = values.new_tensor(torch.inf)
    largest = values.new_tensor(-torch.inf)
    if len(values):
        smallest = values.min()
        largest = values.max()
    rows: Sequence[Sequence[float]]  # one for each process
    rows = gather(torch.stack([count, values.sum(), smallest, largest])[None]).tolist()

    counts, sums, all_smallest, all_largest = zip(*rows, strict=True)
    if not sum(counts):  # all micro-batches are masked
        return None
    return Spread(min(all_smallest), sum(sums) / sum(counts), max(all_largest))
