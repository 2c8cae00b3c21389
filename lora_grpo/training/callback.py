"""Hooks between steps: write metrics, check alarms, and save and stop on a signal."""

from __future__ import annotations

import signal
import sys
from typing import Any

from lora_grpo import distributed
from lora_grpo.errors import RunError
from lora_grpo.runs import Run
from lora_grpo.training.memory_probe import probe
from lora_grpo.training.step_metrics import add_training_time


class RunCallback:
    """Mixin placed before transformers' TrainerCallback.

    Args:
        run: the open run.
        trainer: from `make_trainer`.
        longest_prompt_tokens: length of the longest prompt of all training rows.
    """

    def __init__(self, run: Run, trainer: Any, longest_prompt_tokens: int) -> None:
        self.run, self.trainer, self.longest_prompt_tokens = run, trainer, longest_prompt_tokens

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.run.update(memory_probe=probe(self.trainer, self.run.config, self.longest_prompt_tokens))
        self.trainer.monitor.begin(self.trainer)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        if "reward" in logs and logs["reward"] is None:
            raise RunError(f"no row could be graded in step {state.global_step}: every reward returned None")
        add_training_time(logs)
        self.run.append_metrics({"step": state.global_step, **logs})
        self.trainer.progress.step(state.global_step, logs)
        self.trainer.monitor.after_log(state.global_step, logs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.completion_log.write(state.global_step)
        self.trainer.monitor.after_step(self.trainer, control)
        self.trainer.stop.obey(state, control, self.trainer.num_iterations)

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.monitor.save_best(self.trainer)


class StopOnSignal:
    """Context manager: the first SIGINT or SIGTERM saves a checkpoint and stops, the second stops immediately."""

    caught = 0

    def __enter__(self) -> StopOnSignal:
        self._before = {number: signal.signal(number, self._catch) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: object) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = number
        print("stopping after this step; a second signal stops immediately", file=sys.stderr)

    def obey(self, state: Any, control: Any, num_iterations: int) -> None:
        """Make the trainer save and stop after the same step on all ranks.

        It never stops between two uses of the same rollouts, because a run cannot be resumed there.
        """
        if max(distributed.gather(self.caught)) and state.global_step % num_iterations == 0:
            control.should_save = control.should_training_stop = True
