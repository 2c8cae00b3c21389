"""Which event of transformers' Trainer calls which part of `monitoring/`.

This module imports transformers, so it is imported when a trainer is built.
"""

from typing import Any

from transformers import TrainerCallback

from lora_grpo.monitoring import Monitor, Trackers
from lora_grpo.training import trl_compat


class MonitorCallback(TrainerCallback):
    """Calls the monitor of a run between steps.

    Args:
        trainer: transformers' trainer, which logs a loss that is NaN as it is (`trl_config.py`).
    """

    def __init__(self, monitor: Monitor, trainer: Any) -> None:
        self.monitor = monitor
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The state of a resumed run is that of its checkpoint, and transformers saves by the interval in the state.
        state.save_steps = args.save_steps
        self.monitor.begin(state.global_step, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:  # the Trainer also logs the end of training
            trl_compat.forget_loss(self.trainer, logs["loss"])
            self.monitor.record_step(state.global_step, logs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        next_step = self.monitor.end_step(state.global_step, state)
        if next_step.saves:
            control.should_save = True
        if next_step.stops:
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.save_best()


class TrackersCallback(TrainerCallback):
    """Passes the events of a run on to its trackers."""

    def __init__(self, trackers: Trackers) -> None:
        self.trackers = trackers

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trackers.forward("on_train_begin", *args, **kwargs)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self.trackers.forward("on_log", *args, **kwargs)

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.trackers.forward("on_save", *args, **kwargs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.trackers.forward("on_train_end", *args, **kwargs)
