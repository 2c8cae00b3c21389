"""Metrics that TRL does not log: time per phase, and the logprob mismatch between sampler and trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LOGPROB_MISMATCH = "sampling/sampling_logp_difference/mean"
"""TRL's name for the mean absolute logprob difference between sampler and trainer, in nats per token."""


class StepMetrics:
    """Mixin placed before a GRPOTrainer: adds metrics to each step.

    - `time/rollouts` and `time/rewards`, in seconds, and `rollouts/tokens_per_second`, for the completions of this
      process.
    - `LOGPROB_MISMATCH`. TRL computes it only for vLLM, with another forward pass over all completions. This class
      computes it from the logprobs of the loss when rollouts are used for the first time.
    """

    on_phase: Callable[[str], None] | None = None
    """Called with the name of each phase as it begins."""
    _inputs: dict[str, Any] | None = None

    def _generate(self, prompts: list[Any]) -> Any:
        self._begin("rollouts")
        started = time.perf_counter()
        generated = super()._generate(prompts)  # type: ignore[misc]
        seconds = time.perf_counter() - started
        self._add("time/rollouts", seconds)
        self._add("rollouts/tokens_per_second", sum(map(len, generated[1])) / seconds)
        return generated

    def _calculate_rewards(self, *args: Any) -> Any:
        self._begin("rewards")
        started = time.perf_counter()
        rewards = super()._calculate_rewards(*args)  # type: ignore[misc]
        self._add("time/rewards", time.perf_counter() - started)
        self._begin("training")
        return rewards

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        reused = self._step // self.args.steps_per_generation % self.num_iterations  # type: ignore[attr-defined]
        done_by_trl = self.use_vllm and self.vllm_importance_sampling_correction  # type: ignore[attr-defined]
        measure = model.training and not reused and not done_by_trl
        self._inputs = inputs if measure and "sampling_per_token_logps" in inputs else None
        return super()._compute_loss(model, inputs)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        if self._inputs is not None:
            mask = self._inputs["completion_mask"].bool()
            difference = (result[0].detach() - self._inputs["sampling_per_token_logps"]).abs()[mask]
            sums = difference.new_tensor([difference.sum(), difference.numel()])
            total, tokens = self.accelerator.gather(sums).view(-1, 2).sum(dim=0).tolist()  # type: ignore[attr-defined]
            if tokens:  # zero when the whole micro-batch is masked
                self._metrics["train"][LOGPROB_MISMATCH].append(total / tokens)  # type: ignore[attr-defined]
            self._inputs = None
        return result

    def _begin(self, phase: str) -> None:
        if self.on_phase:
            self.on_phase(phase)

    def _add(self, name: str, value: float) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value)  # type: ignore[attr-defined]


def add_training_time(logs: dict[str, Any]) -> None:
    """Add `time/training`, the remaining time of a step."""
    if "step_time" in logs:
        logs["time/training"] = logs["step_time"] - logs.get("time/rollouts", 0.0) - logs.get("time/rewards", 0.0)
