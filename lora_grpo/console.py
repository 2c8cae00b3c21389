"""What a run or a command tells while it works: notes, results and progress.

    console.note("dropped 3 rows that repeat another row")     # stderr of a command
    console.result("merged    outputs/gsm8k_lora/merged")      # stdout of a command

    with console.listening(console.Terminal()):                # the command line
        ...
    with console.listening(callback):                          # `progress=callback` of the Python API
        ...

Without a listener nothing is printed, and all messages go to the logger `lora_grpo` at the level INFO.
"""

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_logger = logging.getLogger("lora_grpo")
_BAR_WIDTH = 20
"""Characters of a progress bar."""


@dataclass(frozen=True)
class Message:
    """One thing that a run tells. Its text is `str(message)`, so `print` is a listener."""

    kind: Literal["note", "result", "progress"]
    text: str
    """One line or several, without the last line break."""
    task: str = ""
    """With progress: what is being done, such as "GRPO" or "evaluating base"."""
    done: int = 0
    """With progress: the finished steps or samples."""
    total: int | None = None
    """With progress: all steps or samples; None while their number is unknown."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """With the progress of a training step: the line of this step in metrics.jsonl."""
    is_milestone: bool = True
    """With progress: whether this is one of the about ten messages of a task that are enough for a log file."""

    def __str__(self) -> str:
        return self.text


Listener = Callable[[Message], object]

_listeners: list[Listener] = []
"""The innermost listener is the last one; only it is called."""


def note(text: str) -> None:
    """Tell what the user should know: a choice, a warning, dropped rows."""
    send(Message("note", text))


def warning(text: str) -> None:
    """Tell what a script with TRL's trainer must show too: without a listener, a line of the logger on stderr."""
    if _listeners:
        note(text)
    else:
        _logger.warning("%s", text)


def result(text: str = "") -> None:
    """Tell what the command was started for: a table, a path, the next command."""
    send(Message("result", text))


def send(message: Message) -> None:
    """Pass a message to the listener, or to the logger `lora_grpo` if nobody listens."""
    if _listeners:
        _listeners[-1](message)
    else:
        _logger.info("%s", message)


@contextlib.contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Pass the messages of the block to a listener; with None, to the logger."""
    before = list(_listeners)
    if listener is None:
        _listeners.clear()
    else:
        _listeners.append(listener)
    try:
        yield
    finally:
        _listeners[:] = before


def has_changing_line() -> bool:
    """Return whether progress is shown as a line that changes, so that many messages do not become many lines."""
    return bool(_listeners) and isinstance(_listeners[-1], Terminal) and overwrites_lines()


def end_line() -> None:
    """End the line that shows progress on a terminal."""
    if _listeners and isinstance(_listeners[-1], Terminal):
        _listeners[-1].end_line()


class Terminal:
    """Listener of the command line: results to stdout, notes to stderr, progress as a line that changes.

    Without a terminal, such as in a log file, progress has about ten lines for each task.
    """

    def __init__(self) -> None:
        self._has_open_line = False

    def __call__(self, message: Message) -> None:
        if message.kind != "progress" and self._has_open_line:
            print("\x1b[K", end="", file=sys.stderr, flush=True)  # erase it: the message may be shorter
            self._has_open_line = False
        if message.kind == "result":
            print(message.text, flush=True)  # also into a file or a pipe: a server tells its address and goes on
        elif message.kind == "note":
            print(message.text, file=sys.stderr)
        elif overwrites_lines():
            # Erase the rest of the line, which what is printed next overwrites.
            columns = shutil.get_terminal_size().columns - 1
            line = _bar(message) + message.text
            print(f"{line[:columns]}\x1b[K", end="\r", file=sys.stderr, flush=True)
            self._has_open_line = True
        elif message.is_milestone:
            print(message.text, file=sys.stderr)

    def end_line(self) -> None:
        if self._has_open_line:
            print(file=sys.stderr)
            self._has_open_line = False


def _bar(message: Message) -> str:
    """Return a bar that shows how much is done; empty if the end is unknown. Any terminal can show its characters."""
    if not message.total:
        return ""
    filled = min(_BAR_WIDTH, _BAR_WIDTH * message.done // message.total)
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] "


def overwrites_lines() -> bool:
    """Return whether a line on stderr can be overwritten.

    A command in a notebook has a terminal, but the notebook stores every frame. Jupyter sets this variable.
    """
    is_simple = os.environ.get("TERM") == "dumb"  # such as a shell in Emacs
    return sys.stderr.isatty() and not is_simple and "JPY_PARENT_PID" not in os.environ
