"""A lock that allows one process per folder. The kernel releases it when the process exits, even after a crash."""

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from lora_grpo import distributed
from lora_grpo.errors import UserError

_SECONDS_TO_WAIT = 1.0
"""How long `claim` waits for a lock: `is_held` of another process, such as `lora-grpo watch`, has it for a moment."""

held: list[FileLock] = []
"""The locks of this process. A lock that is garbage-collected would be released."""


def claim(folder: Path) -> None:
    """Create the folder if needed, and lock it until `release` or the end of this process.

    Raises:
        UserError: another process holds the lock.
    """
    lock = FileLock(folder / ".lock", timeout=_SECONDS_TO_WAIT)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(poll_interval=0.01)
    except Timeout:
        raise UserError(f"another process is using {folder}; wait for it or give another --output-dir") from None
    held.append(lock)


def release(folder: Path) -> None:
    """Release the lock of a folder, if this process holds it."""
    path = str(folder / ".lock")
    _release([lock for lock in held if lock.lock_file == path])


@contextlib.contextmanager
def released_at_end() -> Iterator[None]:
    """Release the locks that `claim` has taken in the block."""
    held_before = list(held)
    try:
        yield
    finally:
        _release([lock for lock in held if lock not in held_before])


def _release(locks: Sequence[FileLock]) -> None:
    for lock in locks:
        held.remove(lock)
        lock.release()


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Lock the folder for the duration of a `with` block; see `claim`.

    Raises:
        UserError: `claim` failed, or a distributed launcher started more than one process.
    """
    processes = distributed.world_size()
    if processes > 1:
        raise UserError(f"only training runs on several processes, and {processes} were started; start one")
    claim(folder)
    try:
        yield
    finally:
        release(folder)


def is_held(folder: Path) -> bool:
    """Return whether a process currently holds the folder's lock."""
    try:
        with (folder / ".lock").open("rb") as file:
            # Several processes can have a shared lock at once. It ends when the file is closed.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:  # nobody has claimed the folder, or its file system has no locks
        return False
