"""Metrics that TRL does not log: time per phase, logprob mismatch, and how much importance sampling masks."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lora_grpo.training.trl_compat import TrlHooks, sampled_tokens, step_values

LOGPROB_MISMATCH = "sampling/sampling_logp_difference/mean"
"""TRL's name for the mean absolute logprob difference between sampler and trainer, in nats per token."""
MASKED_TOKENS, MASKED_COMPLETIONS = "sampling/masked_tokens", "sampling/masked_completions"
"""Share of tokens, and of completions with such tokens, whose weight the importance sampling correction limits."""


class StepMetrics(TrlHooks):
    """Mixin that adds metrics to each step. List it before the GRPOTrainer class in the bases.

    - `time/rollouts` and `time/rewards`, in seconds, and `rollouts/tokens_per_second`, for the completions of this
      process.
    - `entropy`, if the loss does not log it (Unsloth's): the mean of -logprob over the sampled tokens, an estimate.
      (Otherwise that estimate is used for completions that the loss pass leaves out, see SkipZeroAdvantage.)
    - `LOGPROB_MISMATCH`. TRL computes it only for vLLM, with another forward pass over all completions. This class
      computes it from the logprobs of the loss when rollouts are used for the first time.
    - `MASKED_TOKENS` and `MASKED_COMPLETIONS`, with vLLM: shares of all rollouts of the step, over all processes,
      including those that the loss pass leaves out.
    """

    _inputs: dict[str, Any] | None = None
    _surprisals: Sequence[float] = ()
    """-logprob of each token sampled in this step, in nats."""

    def generate_rollouts(self, prompts: list[Any]) -> Any:
        with self._timed("rollouts") as seconds:
            generated = super().generate_rollouts(prompts)
        token_ids, logprobs = sampled_tokens(generated)
        step_values(self)["rollouts/tokens_per_second"].append(sum(map(len, token_ids)) / seconds[-1])
        self._surprisals = [-logprob for row in logprobs for logprob in row if logprob is not None]
        return generated

    def score_rollouts(self, inputs: Any) -> dict[str, Any]:
        scored = super().score_rollouts(inputs)
        if self.is_corrected_by_trl and scored.get("sampling_per_token_logps") is not None:
            self._log_masked(scored)
        return scored

    def _log_masked(self, scored: dict[str, Any]) -> None:
        mask = scored["completion_mask"].bool()
        masked = is_masked(
            _completion_columns(scored) - scored["sampling_per_token_logps"],
            mask,
            self.vllm_importance_sampling_mode,  # type: ignore[attr-defined]
            self.vllm_importance_sampling_clip_min,  # type: ignore[attr-defined]
            self.vllm_importance_sampling_clip_max,  # type: ignore[attr-defined]
        )
        counts = mask.new_tensor([masked.sum(), mask.sum(), masked.any(dim=1).sum(), len(mask)], dtype=float)
        tokens, all_tokens, rows, all_rows = self.accelerator.gather(counts).view(-1, 4).sum(dim=0).tolist()
        step_values(self)[MASKED_TOKENS].append(tokens / max(all_tokens, 1))
        step_values(self)[MASKED_COMPLETIONS].append(rows / all_rows)

    def reward_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed("rewards"):
            return super().reward_rollouts(*args, **kwargs)

    def compute_grpo_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        measure = not self.reuses_rollouts and not self.is_corrected_by_trl and "sampling_per_token_logps" in inputs
        self._inputs = inputs if measure else None
        return super().compute_grpo_loss(model, inputs)

    def token_logprobs(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().token_logprobs(model, *args, **kwargs)
        if self._inputs is not None:
            rows = self._inputs.get("kept_rows", slice(None))
            mask = self._inputs["completion_mask"][rows].bool()
            difference = (result[0].detach() - self._inputs["sampling_per_token_logps"][rows]).abs()[mask]
            sums = difference.new_tensor([difference.sum(), difference.numel()])
            total, tokens = self.accelerator.gather(sums).view(-1, 2).sum(dim=0).tolist()
            if tokens:  # zero when the whole micro-batch is masked
                step_values(self)[LOGPROB_MISMATCH].append(total / tokens)
            self._inputs = None
        return result

    def log(self, *args: Any, **kwargs: Any) -> None:
        metrics = step_values(self)
        if self._surprisals and not metrics.get("entropy"):
            metrics["entropy"].append(statistics.fmean(self._surprisals))
        self._surprisals = ()
        super().log(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[list[float]]:
        """Add the time inside the block to the metrics, and yield the list that it is appended to."""
        seconds = step_values(self)[f"time/{phase}"]
        started = time.perf_counter()
        yield seconds
        seconds.append(time.perf_counter() - started)


def is_masked(difference: Any, mask: Any, mode: str, low: float | None, high: float | None) -> Any:
    """Return which tokens TRL's importance sampling correction masks (weight 0) or truncates (weight `low` or `high`).

    Args:
        difference: logprobs of the trainer minus those of the sampler, shape (completions, tokens). NaN counts as 0.
        mask: True for tokens, False for padding.
        mode: `vllm_importance_sampling_mode`. Sequence modes compare the ratio of a whole completion with the limits.
        low: `vllm_importance_sampling_clip_min`, or None for no limit.
        high: `vllm_importance_sampling_clip_max`, or None for no limit.
    """
    log_ratio = difference.masked_fill(~mask, 0).nan_to_num(nan=0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratio = log_ratio.exp()
    return ((ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))) & mask


def _completion_columns(scored: dict[str, Any]) -> Any:
    """Return the trainer's logprobs of the completions in the columns of `completion_mask`.

    Unsloth moves the padding of each prompt behind its completion, so its completions start in different columns.
    """
    logprobs, width = scored["old_per_token_logps"], scored["completion_mask"].shape[1]
    moved = logprobs.shape[1] - width
    if not moved:
        return logprobs
    start = moved - (scored["prompt_mask"] == 0).sum(dim=1)
    return logprobs.gather(1, start[:, None] + start.new_tensor(range(width)))
