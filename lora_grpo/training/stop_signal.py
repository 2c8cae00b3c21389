"""Ctrl-C and SIGTERM during training: finish the step, save, stop."""

from __future__ import annotations

import signal
import sys
from typing import Any

from lora_grpo import distributed


class StopOnSignal:
    """While it is entered, the first SIGINT or SIGTERM asks for a checkpoint and a stop, the second ends at once."""

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
        print("stopping after this step; once more stops at once", file=sys.stderr)

    def obey(self, state: Any, control: Any, num_iterations: int) -> None:
        """Ask the trainer to save and stop, between two uses of the same rollouts never: that could not be resumed.

        A signal may reach the ranks in different steps; they stop after the same one.
        """
        if distributed.max_over_processes(self.caught) and state.global_step % num_iterations == 0:
            control.should_save = control.should_training_stop = True
