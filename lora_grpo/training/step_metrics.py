"""Metrics that are added to each step: time per phase, and the logprob mismatch."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lora_grpo.training.trl_compat import TrlHooks, sampled_tokens, step_values

LOGPROB_MISMATCH = "sampling/sampling_logp_difference/mean"
"""TRL's name for the mean absolute logprob difference between sampler and trainer, in nats per token."""


class StepMetrics(TrlHooks):
    """Mixin that adds metrics to each step. List it before the GRPOTrainer class in the bases.

    - `time/rollouts` and `time/rewards`, in seconds, and `rollouts/tokens_per_second`, for the completions of this
      process.
    - `entropy`, if the loss does not log it (Unsloth's): the mean of -logprob over the sampled tokens, an estimate.
      (Otherwise that estimate is used for completions that the loss pass leaves out, see SkipZeroAdvantage.)
    - `LOGPROB_MISMATCH`. TRL computes it only for vLLM, with another forward pass over all completions. This class
      computes it from the logprobs of the loss when rollouts are used for the first time.
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
            mask = self._inputs["completion_mask"]
            if "tool_mask" in self._inputs:  # as in the loss, tokens that the model did not write do not count
                mask = mask * self._inputs["tool_mask"]
            difference = (result[0].detach() - self._inputs["sampling_per_token_logps"][rows]).abs()[mask[rows].bool()]
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
