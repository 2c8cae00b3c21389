"""Completions without an advantage, which have no gradient: those of groups whose rewards have zero variance.

TRL computes them like all others. Here the model does not read them, and TRL still gets values for all tokens: the
logprob of the earlier policy, so that the ratio is 1, and the sampler's -logprob as an estimate of the entropy. The
normalization and the clipping metrics do not change, and the mean entropy covers all completions. With top-p, the
estimate is that of the truncated distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_grpo.loss.scoring import Scored

if TYPE_CHECKING:
    import torch

SAMPLER_LOGPROBS = "sampling_per_token_logps"
"""TRL's name for the logprobs of the sampler, shape (R, completion width)."""


@dataclass
class MicroBatch:
    """The R completions whose loss is computed, and which of them the model has to read."""

    inputs: Mapping[str, Any]
    """TRL's tensors, by name. The first dimension of most is R."""
    rows: torch.Tensor | None
    """Indices of the K completions that the model reads, shape (K,); None for all."""
    logprobs: torch.Tensor | None = None
    """Their logprobs without a gradient, shape (K, completion width), once the pass has computed them."""

    def with_skipped_rows(self, scored: Scored) -> Scored:
        """Return values for all R completions from those of the K that the model has read."""
        logprobs, entropies, router_loss = scored
        assert self.rows is not None
        # NaN where vLLM returns no logprob. Any number gives a ratio of 1.
        sampler_logprobs = self.inputs[SAMPLER_LOGPROBS].nan_to_num()
        # The ratio is relative to this policy: to the sampler's, if that is the current one.
        earlier_logprobs = self.inputs.get("old_per_token_logps", sampler_logprobs)

        all_logprobs = earlier_logprobs.to(logprobs.dtype).index_copy(0, self.rows, logprobs)
        if entropies is not None:
            entropies = (-sampler_logprobs).to(entropies.dtype).index_copy(0, self.rows, entropies)
        return all_logprobs, entropies, router_loss

    def sampler_difference(self) -> torch.Tensor | None:
        """Compare the logprobs of the pass with the sampler's.

        Returns:
            Sum of the absolute differences in nats, and the number of tokens: shape (2,). None without both logprobs.
        """
        if self.logprobs is None or SAMPLER_LOGPROBS not in self.inputs:
            return None
        rows = slice(None) if self.rows is None else self.rows
        # As in the loss, tokens that the model did not write do not count.
        is_from_model = (self.inputs["completion_mask"] * self.inputs.get("tool_mask", 1))[rows].bool()
        differences = (self.logprobs - self.inputs[SAMPLER_LOGPROBS][rows]).abs()[is_from_model]
        return differences.new_tensor([differences.sum(), differences.numel()])


def rows_with_advantage(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the indices of completions with an advantage, at least one, or None for all completions.

    Every process needs a loss: if no completion has an advantage, the shortest one is read.
    """
    if SAMPLER_LOGPROBS not in inputs:
        return None
    advantages = inputs["advantages"]  # (R,)
    rows = advantages.nonzero().squeeze(1)
    if len(rows) == len(advantages):
        return None
    if len(rows) == 0:
        return inputs["completion_mask"].sum(1).argmin()[None]
    return rows
