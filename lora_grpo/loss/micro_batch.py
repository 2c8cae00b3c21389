"""The completions whose loss is computed: those that the model reads, and values for those that it need not read."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_grpo.loss.distillation import TEACHER_LOGPROBS, Distillation, TeacherComparison
from lora_grpo.loss.importance_sampling import ImportanceSampling
from lora_grpo.loss.scoring import Scored

if TYPE_CHECKING:
    import torch

SAMPLER_LOGPROBS = "sampling_per_token_logps"
"""TRL's name for the logprobs of the sampler, shape (R, completion width)."""
OLD_LOGPROBS = "old_per_token_logps"
"""TRL's name for the logprobs of the policy that sampled, of the same shape. They are those of the loss if missing."""
IMPORTANCE_WEIGHTS = "importance_sampling_ratio"
"""TRL's name for the weights of the loss, see `ImportanceSampling`."""


@dataclass
class MicroBatch:
    """The R completions whose loss is computed, and which of them the model has to read."""

    inputs: MutableMapping[str, Any]
    """TRL's tensors, by name. The first dimension of most is R."""
    read_rows: torch.Tensor | None
    """Indices of the K completions that the model reads, shape (K,); None for all."""
    importance_sampling: ImportanceSampling | None = None
    """How the loss is corrected for the sampler; None if it is not, or if TRL has computed the weights."""
    distillation: Distillation | None = None
    """What is learned from a teacher, whose logprobs are in `inputs`; None without one. All completions are read."""
    logprobs: torch.Tensor | None = None
    """Logprobs of the K completions without a gradient, shape (K, completion width); None until they are computed."""

    @property
    def reads_nothing(self) -> bool:
        """Whether no completion has a gradient, so that the model need not be called."""
        return self.read_rows is not None and not len(self.read_rows)

    def keep_logprobs(self, logprobs: torch.Tensor) -> None:
        """Keep the logprobs of the K completions, and give TRL's loss what follows from them.

        These are the advantages of tokens, if there is a teacher, and the importance weights.
        """
        self.logprobs = logprobs.detach()
        if self.distillation is not None:
            self.inputs["advantages"] = self.distillation.advantages(
                self.inputs["advantages"], self._logprobs_of_sampling_policy(), self.inputs[TEACHER_LOGPROBS]
            )
        if self.importance_sampling is None:
            return
        weights = self.importance_sampling.weights(
            self._logprobs_of_sampling_policy(), self._of_read_rows(SAMPLER_LOGPROBS), self.loss_mask()
        )
        if self.read_rows is not None:
            # Those that were left out have no gradient, whatever their weights are.
            all_weights = weights.new_ones(len(self.inputs[SAMPLER_LOGPROBS]), weights.shape[1])
            weights = all_weights.index_copy(0, self.read_rows, weights)
        self.inputs[IMPORTANCE_WEIGHTS] = weights

    def with_skipped_rows(self, scored: Scored) -> Scored:
        """Return values for all R completions from those of the K that the model has read.

        Those that were left out get TRL's old logprobs, or the sampler's if TRL has computed none, so that the ratio is
        1. Their entropy is estimated by -logprob of the sampler; with top-p, that of the truncated distribution.
        """
        logprobs, entropies, router_loss = scored
        all_logprobs, all_entropies = self._without_model()
        all_logprobs = all_logprobs.to(logprobs.dtype).index_copy(0, self.read_rows, logprobs)
        if entropies is not None:
            entropies = all_entropies.to(entropies.dtype).index_copy(0, self.read_rows, entropies)
        return all_logprobs, entropies, router_loss

    def without_pass(self, zero: torch.Tensor) -> Scored:
        """Return values for all R completions if none has a gradient.

        Args:
            zero: 0 as a function of the trained weights.
        """
        logprobs, entropies = self._without_model()
        if self.importance_sampling is not None:
            self.inputs[IMPORTANCE_WEIGHTS] = logprobs.new_ones(logprobs.shape)
        return logprobs + zero, entropies, None

    def _without_model(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs and entropies of all R completions that need no model; see `with_skipped_rows`."""
        # The sampler's logprobs are NaN where vLLM returns none. Without old logprobs, TRL's ratio is relative to the
        # values returned here, so any finite number gives 1.
        sampler_logprobs = self.inputs[SAMPLER_LOGPROBS].nan_to_num()
        logprobs = self.inputs.get(OLD_LOGPROBS, sampler_logprobs)
        entropies = -sampler_logprobs
        return logprobs, entropies

    def sampler_differences(self) -> torch.Tensor | None:
        """Compare the logprobs of the policy that sampled with the sampler's.

        Returns:
            The absolute differences in nats of the tokens that have a loss and both logprobs, shape (tokens,). None
            without logprobs of the sampler or of the pass.
        """
        if self.logprobs is None or SAMPLER_LOGPROBS not in self.inputs:
            return None
        differences = (self._logprobs_of_sampling_policy() - self._of_read_rows(SAMPLER_LOGPROBS)).abs()
        return differences[self.loss_mask().bool() & ~differences.isnan()]

    def importance_weights(self) -> torch.Tensor | None:
        """Return the weights of the tokens that have a loss, or of the K completions, shape (values,); None without."""
        if self.importance_sampling is None or self.logprobs is None:
            return None
        weights = self._of_read_rows(IMPORTANCE_WEIGHTS)
        mask = self.loss_mask().bool()
        has_weight_per_token = weights.shape == mask.shape
        if has_weight_per_token:
            return weights[mask]
        return weights.flatten()

    def add_to(self, comparison: TeacherComparison, divergences: torch.Tensor | None) -> None:
        """Compare the policy that sampled with the teacher, and add the result to a comparison.

        Args:
            divergences: of the tokens, shape (R, completion width); None if the loss has no divergence.
        """
        logprobs = self._logprobs_of_sampling_policy()
        comparison.add(logprobs, self.inputs[TEACHER_LOGPROBS], self.loss_mask(), divergences)

    def _logprobs_of_sampling_policy(self) -> torch.Tensor:
        """Return the trainer's logprobs of the K completions, from before any update on them."""
        if OLD_LOGPROBS in self.inputs:
            return self._of_read_rows(OLD_LOGPROBS)
        assert self.logprobs is not None
        return self.logprobs

    def loss_mask(self) -> torch.Tensor:
        """Return a mask of the K completions, shape (K, completion width): 1 for tokens that have a loss.

        Padding and tokens that the model did not write have none.
        """
        mask = self._of_read_rows("completion_mask")
        if "tool_mask" in self.inputs:
            mask = mask * self._of_read_rows("tool_mask")
        return mask

    def _of_read_rows(self, name: str) -> torch.Tensor:
        """Return the rows of the K completions of a tensor of the loss."""
        values: torch.Tensor = self.inputs[name]
        if self.read_rows is None:
            return values
        return values[self.read_rows]
