"""Sampler and trainer are two implementations of one policy: how far apart they are, and TRL's correction for it."""

from __future__ import annotations

import types
from typing import Any

from lora_grpo.errors import UserError

METRIC = "sampling/sampling_logp_difference/mean"
"""TRL's name: mean absolute difference of log-probabilities, sampler against trainer, in nats a token."""


class LogprobMismatchMeter:
    """Mixed in before a GRPOTrainer: measures `METRIC` where TRL does not, from the log-probabilities of the loss.

    TRL computes it for vLLM alone, by one more forward pass over all completions. The loss knows the same numbers as
    long as the rollouts are used for the first time.
    """

    _inputs: dict[str, Any] | None = None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        again = self._step // self.args.steps_per_generation % self.num_iterations  # type: ignore[attr-defined]
        done_by_trl = self.use_vllm and self.vllm_importance_sampling_correction  # type: ignore[attr-defined]
        measure = model.training and not again and not done_by_trl
        self._inputs = inputs if measure and "sampling_per_token_logps" in inputs else None
        return super()._compute_loss(model, inputs)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        if self._inputs is not None:
            mask = self._inputs["completion_mask"].bool()
            apart = (found[0].detach() - self._inputs["sampling_per_token_logps"]).abs()[mask]
            sums = apart.new_tensor([apart.sum(), apart.numel()])
            total, tokens = self.accelerator.gather(sums).view(-1, 2).sum(dim=0).tolist()  # type: ignore[attr-defined]
            if tokens:  # of a micro-batch that is masked as a whole nothing can be said
                self._metrics["train"][METRIC].append(total / tokens)  # type: ignore[attr-defined]
            self._inputs = None
        return found


def correct(trainer: Any) -> None:
    """Have TRL weigh completions by trainer over sampler probability, as it does for a vLLM of its own.

    By its default a completion's weight is the product over its tokens, and one beyond 3 is left out
    (`vllm_importance_sampling_mode`, `..._clip_max`).

    It does so where `use_vllm` is set, which as an argument would also start an engine that merges the adapter into
    the base for each hand-over. So it is set afterwards; the rollout function hands the adapter over.

    Raises:
        UserError: TRL would have refused it.
    """
    if trainer.loss_type == "vespo" and trainer.vllm_importance_sampling_mode.startswith("sequence"):
        raise UserError(
            "--grpo loss_type=vespo weighs tokens; with vLLM pass vllm_importance_sampling_mode=token_truncate too"
        )
    trainer.use_vllm = True
    trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = -1


def drops_out(model: Any) -> bool:
    """Tell whether a model in training differs from itself in evaluation, by its own settings or the adapter's."""
    import torch

    settings = [getattr(model.config, name, 0) for name in ("attention_dropout", "activation_dropout")]
    return any(settings) or any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in model.modules())
