"""TRL's SFTTrainer for a run. This module imports TRL, so it is imported when a trainer is built."""

from typing import Any

from trl import SFTTrainer

from lora_grpo.monitoring import StepMetrics, clock
from lora_grpo.runs import AtomicCheckpoints, Run
from lora_grpo.training import trl_compat


class RecipeSFTTrainer(AtomicCheckpoints, SFTTrainer):
    """An SFTTrainer that logs the seconds of a step, and has what the logprob check reads of a GRPOTrainer."""

    temperature = 1.0
    max_completion_length: int

    def __init__(self, run: Run, **arguments: Any) -> None:
        self.keep_checkpoints = run.config.train.keep_checkpoints
        self.max_completion_length = run.config.sampling.max_completion_tokens
        self._step_seconds = 0.0
        trl_compat.fit_fused_head_to_cpu()
        trained_adapter = trl_compat.trained_adapter(arguments["model"])
        super().__init__(**arguments)
        trl_compat.use_float32_adapter(self.model, trained_adapter)
        self.step_metrics = StepMetrics(trl_compat.step_values(self))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Measure a micro-batch."""
        started = clock()
        loss = super().training_step(*args, **kwargs)
        self._step_seconds += clock() - started
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the memory of the loss, and then of the backward pass and the optimizer."""
        with self.step_metrics.peaks.phase("loss", then="backward"):
            return super().compute_loss(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the seconds of the step's micro-batches, and its peaks of memory."""
        trl_compat.step_values(self).pop("num_tokens", None)  # counted from the last resume
        if "loss" in logs:  # the Trainer also logs the end of training
            self.step_metrics.add("step_time", self._step_seconds)
            self._step_seconds = 0.0
        self.step_metrics.complete()
        super().log(logs, *args, **kwargs)
