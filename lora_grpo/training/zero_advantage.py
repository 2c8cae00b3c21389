"""Leave completions that cannot change the gradient out of the loss pass, for TRL's own trainer."""

from __future__ import annotations

from typing import Any

from lora_grpo.training.trl_compat import TrlHooks


class SkipZeroAdvantage(TrlHooks):
    """Mixin that computes no logprobs of completions whose advantage is zero. List it before StepMetrics.

    If all rewards of a group are equal, its advantages are zero, and so is its gradient, unless a KL term or an entropy
    bonus acts on all tokens. TRL still gets values for all tokens: the logprob of the earlier policy, so that the ratio
    is 1, and the sampler's -logprob as an estimate of the entropy. The normalization and the clipping metrics do not
    change, and the mean entropy covers all completions. With top-p, the estimate is that of the truncated distribution.
    """

    _kept: Any = None
    """Rows of the micro-batch that are computed, or None for all."""
    _sampled: Any = None
    """The sampler's logprobs of all rows."""
    _earlier: Any = None
    """Logprobs of the policy that TRL's ratio is relative to; the sampler's if that is the current policy."""

    def compute_grpo_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        kept = self._rows_with_advantage(inputs)
        if kept is None:
            return super().compute_grpo_loss(model, inputs)
        # NaN where vLLM returns no logprob. Any number gives a ratio of 1.
        self._kept, self._sampled = kept, inputs["sampling_per_token_logps"].nan_to_num()
        self._earlier = inputs.get("old_per_token_logps", self._sampled)
        try:
            return super().compute_grpo_loss(model, {**inputs, "kept_rows": kept})
        finally:
            self._kept = self._sampled = self._earlier = None

    def token_logprobs(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        score, kept = super().token_logprobs, self._kept
        if kept is None:
            return score(model, *args, **kwargs)
        ids, mask, *rest = args
        logprobs, entropies, aux_loss = score(model, ids[kept], mask[kept], *rest, **kwargs)
        all_logprobs = self._earlier.to(logprobs.dtype).index_copy(0, kept, logprobs)
        if entropies is not None:
            entropies = (-self._sampled).to(entropies.dtype).index_copy(0, kept, entropies)
        return all_logprobs, entropies, aux_loss

    def _rows_with_advantage(self, inputs: dict[str, Any]) -> Any:
        """Return the rows with an advantage, at least one so that every process has a loss, or None for all rows."""
        if self.loss_depends_on_all_tokens or "sampling_per_token_logps" not in inputs:
            return None
        rows = inputs["advantages"].nonzero().squeeze(1)
        if len(rows) == len(inputs["advantages"]):
            return None
        if not len(rows):  # the shortest
            rows = inputs["completion_mask"].sum(1).argmin()[None]
        return rows
