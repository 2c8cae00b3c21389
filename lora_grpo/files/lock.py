"""One process a folder: who works in it holds it, and the kernel lets go of it whatever ends the process."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lora_grpo import distributed
from lora_grpo.errors import UserError


def claim(folder: Path, flag: str = "--output-dir") -> None:
    """Make the folder if need be, and hold it for as long as this process lives.

    Args:
        folder: to be held.
        flag: what chose it, for the message.

    Raises:
        UserError: it cannot be written, or another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"{flag} {folder} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process works in {folder}; wait for it or give another {flag}") from None
    except OSError as error:
        raise UserError(f"{flag} {folder} cannot be held: {error.strerror}") from None
    held.append(handle)


@contextlib.contextmanager
def holding(folder: Path, flag: str = "--output-dir") -> Iterator[None]:
    """Hold the folder for the length of a block; see `claim`. What does so is one process's work.

    Raises:
        UserError: as `claim`, or a launcher started several processes.
    """
    if distributed.world_size() > 1:
        raise UserError(
            f"training alone is shared by processes, and {distributed.world_size()} were started; start one"
        )
    claim(folder, flag)
    try:
        yield
    finally:
        held.pop().close()


def is_held(folder: Path) -> bool:
    """Return whether a process works in the folder at this moment."""
    try:
        with (folder / ".lock").open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system that cannot tell
        return False
    return False


held: list[IO[str]] = []
"""The locks of this process."""
