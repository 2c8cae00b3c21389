"""Stop training after the current step at Ctrl-C or SIGTERM."""

import signal
import sys
from typing import Self

from lora_grpo import distributed


class StopOnSignal:
    """Context manager: the first SIGINT or SIGTERM saves a checkpoint and stops, a second one stops immediately."""

    caught = 0
    """Number of the signal that this process caught, or 0."""

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._catch) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: object) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = number
        print("stopping after this step; a second signal stops immediately", file=sys.stderr)

    def signal_number(self) -> int:
        """Return the signal that any rank caught, or 0. Call it on all ranks, so that they stop after the same step."""
        return max(distributed.gather(self.caught))
