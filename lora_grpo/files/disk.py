"""One-line errors for disks that are too small or full: the path, the space that it needs, and the free space."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_grpo.errors import RunError, UserError


class DiskFullError(RunError):
    """A file could not be written because the disk or a quota is full. No incomplete file remains."""


@dataclass(frozen=True)
class FreeSpace:
    """The free space of a disk."""

    folder: Path
    """A folder on the disk."""
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.folder} has {size(self.num_bytes)} free"


def free_space(path: Path) -> FreeSpace:
    """Return the free space where `path` is or will be, with the closest folder that exists."""
    folders = (path, *path.absolute().parents)
    existing = next(folder for folder in folders if folder.is_dir())
    return FreeSpace(existing, shutil.disk_usage(existing).free)


def check_free_space(folder: Path, num_bytes: int) -> None:
    """Raise a UserError if the disk has fewer than `num_bytes` free. The folder may not exist yet."""
    free = free_space(folder)
    if free.num_bytes < num_bytes:
        raise UserError(f"{free} and needs {size(num_bytes)}; free some space, or write to another disk")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of a full disk in the block, which writes `path`, to a DiskFullError.

    The block removes what it has written, so that the error reports the space that the next attempt has.
    """
    try:
        yield
    except Exception as error:  # libraries report a full disk with many types
        full_disk_error = disk_full(error, path)
        if full_disk_error:
            raise full_disk_error from None
        raise


def disk_full(error: BaseException, path: Path | None = None) -> DiskFullError | None:
    """Return an error of a full disk as one line; None for any other error.

    Args:
        error: the error, which may have been raised while another one was handled.
        path: the file or folder that was being written. Default: the one that the error names.
    """
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, DiskFullError):
            return cause
        reason = _reason(cause)
        if reason:
            if path is None and isinstance(cause, OSError) and cause.filename:
                path = Path(cause.filename)
            if path is None:
                return DiskFullError(f"the output cannot be written: {reason}")
            return DiskFullError(f"{path} cannot be written: {reason}; {free_space(path)}")
        cause = cause.__cause__ or cause.__context__
    return None


def size(num_bytes: float) -> str:
    """Return a number of bytes in GB, in MB below 1 GB, or in kB below 0.1 MB."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    if num_bytes >= 1e5:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes / 1e3:.1f} kB"


def _reason(error: BaseException) -> str | None:
    """Return why an error means that the disk is full, or None."""
    # Rust's errors (safetensors, tokenizers) have the number in their message.
    in_message = re.search(r"\(os error (\d+)\)$", str(error))
    number = int(in_message[1]) if in_message else getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return os.strerror(number)

    # torch.save reports no reason. It raises this error if it could not write a part of its file.
    if isinstance(error, RuntimeError) and "unexpected pos" in str(error):
        return "torch.save failed, as on a full disk"
    return None
