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
    folder.mkdir(parents=True, exist_ok=True)
    _acquire(folder / ".lock", folder)


def release(folder: Path) -> None:
    """Release the lock of a folder, if this process holds it."""
    _release_file(folder / ".lock")


def _acquire(file: Path, locked: Path) -> None:
    """Lock a file, or raise a UserError that names what another process has locked by it."""
    lock = FileLock(file, timeout=_SECONDS_TO_WAIT)
    try:
        lock.acquire(poll_interval=0.01)
    except Timeout:
        raise UserError(f"another process is using {locked}; wait for it or give another --output-dir") from None
    held.append(lock)


def _release_file(file: Path) -> None:
    _release([lock for lock in held if lock.lock_file == str(file)])


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

    Folders that were made for it are removed at the end if the block has written nothing.

    Raises:
        UserError: `claim` failed, or a distributed launcher started more than one process.
    """
    _check_one_process()
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    claim(folder)
    try:
        yield
    finally:
        file = folder / ".lock"
        if new_folders and list(folder.glob("*")) == [file]:
            file.unlink()  # while it is locked
        release(folder)
        _remove_empty(new_folders)


@contextlib.contextmanager
def holding_new(path: Path) -> Iterator[None]:
    """Lock a folder that appears in a `with` block, for the duration of the block, by the file `.NAME.lock` beside it.

    At the end, the file is removed, and so are the parents of `path` that were made for it, if they are empty.

    Raises:
        UserError: another process holds the lock, or a distributed launcher started more than one process.
    """
    _check_one_process()
    file = path.with_name(f".{path.name}.lock")
    new_parents = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    _acquire(file, path)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is locked: a process that waits for it makes another one
        _release_file(file)
        _remove_empty(new_parents)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove those of the folders that are empty, the innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


def _check_one_process() -> None:
    processes = distributed.world_size()
    if processes > 1:
        raise UserError(f"only training runs on several processes, and {processes} were started; start one")


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
