"""Progress of a task: a line that changes on a terminal, otherwise a few lines."""

import os
import shutil
import sys
import time
from typing import Any

_PLAIN_LINES = 10
"""Number of lines per task if there is no terminal."""


class Progress:
    """Shows how many of the steps of a task are done, with a note."""

    def __init__(self, total: int | None, title: str = "GRPO") -> None:
        self.total, self.title = total, title
        """The total may change, and is None while it is unknown."""
        self._reward = self._validation = ""
        self._started: tuple[float, int] | None = None
        self._next = 0
        # A command in a notebook has a terminal, but the notebook stores every frame. Jupyter sets this variable.
        self._overwrites = sys.stderr.isatty() and "JPY_PARENT_PID" not in os.environ

    def step(self, done: int, logs: dict[str, Any]) -> None:
        """Show a training step with the latest reward, or the loss of SFT, and the latest validation reward."""
        if "validation/reward" in logs:
            self._validation = f", validation {logs['validation/reward']:.2f}"
        if "reward" in logs:  # absent if the step reuses rollouts
            mean, spread = logs["reward"], logs["reward_std"]
            # Both are None if no completion could be graded, and the spread if only one could.
            self._reward = "no reward" if mean is None else f"reward {mean:.2f}"
            if spread is not None:
                self._reward += f" ± {spread:.2f}"
        elif self.title == "SFT":
            self._reward = f"loss {logs['loss']:.3f}"
        self.show(done, self._reward + self._validation)

    def show(self, done: int, note: str) -> None:
        """Show the number of finished steps, with a note."""
        now = time.monotonic()
        self._started = since, first = self._started or (now, done)
        total = self.total or done
        if not self._overwrites and self._next > done < total:
            return
        every = max(1, total // _PLAIN_LINES)
        self._next = (done // every + 1) * every
        left = (now - since) / max(1, done - first) * (total - done)
        eta = f", {left:.0f} s left" if first < done < total else ""
        line = f"{self.title} {done}/{self.total or '?'}  {note}{eta}"
        if self._overwrites:  # erase the rest of the line; what is printed next overwrites it
            print(f"{line[: shutil.get_terminal_size().columns - 1]}\x1b[K", end="\r", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr)

    def close(self) -> None:
        """End the line of a terminal."""
        if self._overwrites and self._started:
            print(file=sys.stderr)
