"""Metrics that TRL does not log: time per phase, and the logprob mismatch between sampler and trainer."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

LOGPROB_MISMATCH = "sampling/sampling_logp_difference/mean"
"""TRL's name for the mean absolute logprob difference between sampler and trainer, in nats per token."""


class StepMetrics:
    """Mixin that adds metrics to each step. List it before the GRPOTrainer class in the bases.

    - `time/rollouts` and `time/rewards`, in seconds, and `rollouts/tokens_per_second`, for the completions of this
      process.
    - `entropy`, if the loss does not log it (Unsloth's): the mean of -logprob over the sampled tokens, an estimate.
      (Otherwise that estimate is used for completions that the loss pass leaves out, see SkipZeroAdvantage.)
    - `LOGPROB_MISMATCH`. TRL computes it only for vLLM, with another forward pass over all completions. This class
      computes it from the logprobs of the loss when rollouts are used for the first time.
    """

    _inputs: dict[str, Any] | None = None
    _metrics: dict[str, Any]
    _surprisals: Sequence[float] = ()
    """-logprob of each token sampled in this step, in nats."""

    def _generate(self, prompts: list[Any]) -> Any:
        with self._timed("rollouts") as seconds:
            generated = super()._generate(prompts)  # type: ignore[misc]
        tokens = sum(map(len, generated[1]))
        self._metrics["train"]["rollouts/tokens_per_second"].append(tokens / seconds[-1])
        self._surprisals = [-logprob for row in generated[4] or () for logprob in row if logprob is not None]
        return generated

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed("rewards"):
            return super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        reused = self._step // self.args.steps_per_generation % self.num_iterations  # type: ignore[attr-defined]
        done_by_trl = self.use_vllm and self.vllm_importance_sampling_correction  # type: ignore[attr-defined]
        measure = not reused and not done_by_trl and "sampling_per_token_logps" in inputs
        self._inputs = inputs if measure else None
        return super()._compute_loss(model, inputs)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        if self._inputs is not None:
            rows = self._inputs.get("kept_rows", slice(None))
            mask = self._inputs["completion_mask"][rows].bool()
            difference = (result[0].detach() - self._inputs["sampling_per_token_logps"][rows]).abs()[mask]
            sums = difference.new_tensor([difference.sum(), difference.numel()])
            total, tokens = self.accelerator.gather(sums).view(-1, 2).sum(dim=0).tolist()  # type: ignore[attr-defined]
            if tokens:  # zero when the whole micro-batch is masked
                self._metrics["train"][LOGPROB_MISMATCH].append(total / tokens)
            self._inputs = None
        return result

    def log(self, *args: Any, **kwargs: Any) -> None:
        metrics = self._metrics["train"]
        if self._surprisals and not metrics.get("entropy"):
            metrics["entropy"].append(statistics.fmean(self._surprisals))
        self._surprisals = ()
        super().log(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[list[float]]:
        """Add the time inside the block to the metrics, and yield the list that it is appended to."""
        seconds = self._metrics["train"][f"time/{phase}"]
        started = time.perf_counter()
        yield seconds
        seconds.append(time.perf_counter() - started)
