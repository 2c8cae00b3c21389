"""The completions whose loss is computed: those that the model reads, and values for those that it need not read."""

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
    read_rows: torch.Tensor | None
    """Indices of the K completions that the model reads, shape (K,); None for all."""
    logprobs: torch.Tensor | None = None
    """Logprobs of the K completions without a gradient, shape (K, completion width); None until they are computed."""

    def with_skipped_rows(self, scored: Scored) -> Scored:
        """Return values for all R completions from those of the K that the model has read.

        Those that were left out get TRL's old logprobs, or the sampler's if TRL has computed none, so that the ratio is
        1. Their entropy is estimated by -logprob of the sampler; with top-p, that of the truncated distribution.
        """
        logprobs, entropies, router_loss = scored
        assert self.read_rows is not None
        # The sampler's logprobs are NaN where vLLM returns none. Without old logprobs, TRL's ratio is relative to the
        # values returned here, so any finite number gives 1.
        sampler_logprobs = self.inputs[SAMPLER_LOGPROBS].nan_to_num()
        old_logprobs = self.inputs.get("old_per_token_logps", sampler_logprobs)

        all_logprobs = old_logprobs.to(logprobs.dtype).index_copy(0, self.read_rows, logprobs)
        if entropies is not None:
            entropies = (-sampler_logprobs).to(entropies.dtype).index_copy(0, self.read_rows, entropies)
        return all_logprobs, entropies, router_loss

    def sampler_difference(self) -> torch.Tensor | None:
        """Compare the logprobs of the pass with the sampler's.

        Returns:
            Sum of the absolute differences in nats, and the number of tokens: shape (2,). None without both logprobs.
        """
        if self.logprobs is None or SAMPLER_LOGPROBS not in self.inputs:
            return None
        rows = slice(None) if self.read_rows is None else self.read_rows
        # As in the loss, tokens that the model did not write do not count.
        has_loss = (self.inputs["completion_mask"] * self.inputs.get("tool_mask", 1))[rows].bool()
        differences = (self.logprobs - self.inputs[SAMPLER_LOGPROBS][rows]).abs()[has_loss]
        return differences.new_tensor([differences.sum(), differences.numel()])
