"""Progress of a task: a progress bar on a terminal, otherwise a few plain lines."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

_PLAIN_LINES = 10
"""Number of lines per task if there is no terminal."""


class Progress:
    """Shows how many of the steps of a task are done, with a note."""

    def __init__(self, total: int | None, title: str = "GRPO") -> None:
        self.total, self.title = total, title
        """The total may change, and is None as long as it is not known."""
        self._reward = self._validation = ""
        self._started: tuple[float, int] | None = None
        self._next = 0
        self._bar: Any = None
        # A command in a notebook has a terminal, but the notebook stores every frame. Jupyter sets this variable.
        if sys.stderr.isatty() and "JPY_PARENT_PID" not in os.environ:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            note = TextColumn("{task.fields[note]}")
            columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note)
            self._bar = RichProgress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, note="")

    def step(self, done: int, logs: dict[str, Any]) -> None:
        """Show a training step with the latest reward, or the loss of SFT, and the latest validation reward."""
        if "validation/reward" in logs:
            self._validation = f", validation {logs['validation/reward']:.2f}"
        if "reward" in logs:  # absent if the step reuses rollouts
            self._reward = f"reward {logs['reward']:.2f} ± {logs['reward_std']:.2f}"
        elif self.title == "SFT":
            self._reward = f"loss {logs['loss']:.3f}"
        self.show(done, self._reward + self._validation)

    def show(self, done: int, note: str) -> None:
        """Show the number of finished steps, with a note."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=self.total, note=note)
            return
        now = time.monotonic()
        if self._started is None:
            self._started = (now, done)
        total = self.total or done
        if done >= self._next or done >= total:
            every = max(1, total // _PLAIN_LINES)
            self._next = (done // every + 1) * every
            since, first = self._started
            left = (now - since) / max(1, done - first) * (total - done)
            eta = f", {left:.0f} s left" if first < done < total else ""
            print(f"{self.title} {done}/{self.total or '?'}  {note}{eta}", file=sys.stderr)

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar:
            self._bar.stop()
            self._bar = None
