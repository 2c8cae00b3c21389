"""Stop training after the current step at Ctrl-C or SIGTERM."""

import signal
import threading
from typing import Any, Self

from lora_grpo import console, distributed


class StopOnSignal:
    """Context manager: the first SIGINT or SIGTERM saves a checkpoint and stops, a second one stops immediately."""

    caught = 0
    """Number of the signal that this process caught, or 0."""

    def __enter__(self) -> Self:
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # Python handles signals nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: object) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = number
        console.note("stopping after this step; a second signal stops immediately")

    def signal_number(self) -> int:
        """Return the signal that any process caught, or 0. All call it, so that they stop after the same step."""
        return max(distributed.gather(self.caught))
