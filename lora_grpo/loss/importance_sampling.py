"""Importance sampling: weights that correct the loss for the difference between sampler and trainer.

A sampler such as vLLM computes with other kernels and roundings than the trainer, so its tokens come from a slightly
different distribution. The weight of a token is its probability in the trainer divided by its probability in the
sampler. The modes and limits are those of TRL's `vllm_importance_sampling_*`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ImportanceSampling:
    """How the ratios of trainer and sampler become weights of the loss."""

    mode: str
    """`token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`: whether a token has its own ratio or that
    of its completion, the product of its tokens' ratios; and what becomes of a ratio outside the limits, which is
    replaced by the limit or by 0. An episode of several model calls is one completion, with the tokens of all calls."""
    smallest: float
    """Lower limit of the ratios; 0 for none."""
    largest: float
    """Upper limit of the ratios; infinity for none."""

    def weights(self, logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        """Return the weights of R completions, without a gradient.

        Args:
            logprobs: of the trainer's policy, in nats, shape (R, completion width).
            sampler_logprobs: of the same shape. NaN, where vLLM returns none, gives the ratio 1.
            loss_mask: 1 for the tokens that have a loss, of the same shape.

        Returns:
            Shape (R, completion width), or (R, 1) if completions have one weight.

        Source: `_generate_and_score_completions` of TRL 1.14, which has no function for it.
        """
        differences = (logprobs.detach() - sampler_logprobs) * loss_mask
        differences = differences.nan_to_num(nan=0.0)
        if self.mode.startswith("sequence"):
            differences = differences.sum(dim=1, keepdim=True)
        ratios = differences.exp()
        limited = ratios.clamp(self.smallest, self.largest)
        if self.mode.endswith("truncate"):
            return limited
        return ratios.masked_fill(ratios != limited, 0.0)
