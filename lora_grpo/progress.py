"""Progress of a task: how much is done, with a note and the time that is left, or that it takes long."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lora_grpo import console

_SECONDS_WITHOUT_NOTE = 5.0
"""What takes less than this is not worth a message."""
_MILESTONES = 10
"""Number of messages per task that are enough where lines cannot be overwritten."""


def duration(seconds: float) -> str:
    """Format a duration: 41 s, 2 min 51 s or 1 h 48 min."""
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, remaining_minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {remaining_minutes} min"
    if minutes:
        return f"{minutes} min {remaining_seconds} s"
    return f"{remaining_seconds} s"


@contextlib.contextmanager
def waiting(task: str) -> Iterator[None]:
    """Tell that the block takes long, if it does and nobody knows how long.

    After a few seconds a note says what is being done. On a terminal, it is a line that also counts the seconds.
    """
    started_at = time.monotonic()
    has_ended = threading.Event()

    def tell() -> None:
        if has_ended.wait(_SECONDS_WITHOUT_NOTE):
            return
        if not console.has_changing_line():
            console.note(f"{task}; this takes a while")
            return
        while True:
            console.send(console.Message("progress", f"{task}, {duration(time.monotonic() - started_at)}", task=task))
            if has_ended.wait(1):
                console.end_line()
                return

    teller = threading.Thread(target=tell, name="lora_grpo-waiting", daemon=True)
    teller.start()
    try:
        yield
    finally:
        has_ended.set()
        teller.join()


class Progress:
    """Tells how many of the steps of a task are done."""

    def __init__(self, total: int | None, title: str = "GRPO") -> None:
        self.total = total
        """Number of steps. It may change, and is None while it is unknown."""
        self.title = title
        self._reward = ""
        self._validation = ""
        self._first_time = 0.0
        """The clock at the first message."""
        self._first_done: int | None = None
        """The number of finished steps at the first message."""
        self._next_milestone = 0

    def step(self, done: int, logs: Mapping[str, Any]) -> None:
        """Tell a training step with the latest reward, or the loss of SFT, and the latest validation reward."""
        if "validation/reward" in logs:
            self._validation = f", validation {logs['validation/reward']:.2f}"
        if "reward" in logs:  # absent if the step reuses rollouts
            mean = logs["reward"]
            spread = logs["reward_std"]
            # Both are None if no completion could be graded, and the spread if only one could.
            self._reward = "no reward"
            if mean is not None:
                self._reward = f"reward {mean:.2f}"
            if spread is not None:
                self._reward += f" ± {spread:.2f}"
        elif self.title == "SFT":
            self._reward = f"loss {logs['loss']:.3f}"
        self.show(done, self._reward + self._validation, logs)

    def show(self, done: int, note: str, metrics: Mapping[str, Any] | None = None) -> None:
        """Tell the number of finished steps, with a note."""
        now = time.monotonic()
        if self._first_done is None:
            self._first_time = now
            self._first_done = done
        total = self.total or done

        time_left = ""
        if self._first_done < done < total:
            seconds_per_step = (now - self._first_time) / (done - self._first_done)
            time_left = f", {duration(seconds_per_step * (total - done))} left"
        is_milestone = done >= self._next_milestone or done >= total
        if is_milestone:
            every = max(1, total // _MILESTONES)
            self._next_milestone = (done // every + 1) * every

        text = f"{self.title} {done}/{self.total or '?'}  {note}{time_left}"
        console.send(
            console.Message(
                "progress",
                text,
                task=self.title,
                done=done,
                total=self.total,
                metrics=dict(metrics or {}),
                is_milestone=is_milestone,
            )
        )

    def close(self) -> None:
        """End the line of a terminal."""
        console.end_line()
