"""One-line errors for disks that are too small or full: the path, the space that it needs, and the free space."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from lora_grpo.errors import RunError, UserError


class DiskFullError(RunError):
    """A file could not be written because the disk or a quota is full. No incomplete file remains."""


def check_free_space(folder: Path, num_bytes: int, fix: str = ", or write to another disk") -> None:
    """Raise a UserError if the disk has fewer than `num_bytes` free. The folder may not exist yet."""
    existing, free = free_space(folder)
    if free < num_bytes:
        raise UserError(f"{existing} has {size(free)} free and needs {size(num_bytes)}; free some space{fix}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of a full disk in the block, which writes `path`, to a DiskFullError.

    The block removes what it has written, so that the error reports the space that the next attempt has.
    """
    try:
        yield
    except Exception as error:  # libraries report a full disk with many types
        if full := disk_full(error, path):
            raise full from None
        raise


def disk_full(error: BaseException, path: Path | None = None) -> DiskFullError | None:
    """Return an error of a full disk as one line; None for any other error."""
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, DiskFullError):
            return cause
        if reason := _reason(cause):
            path = path or (Path(cause.filename) if isinstance(cause, OSError) and cause.filename else None)
            if path is None:
                return DiskFullError(f"the output cannot be written: {reason}")
            existing, free = free_space(path)
            return DiskFullError(f"{path} cannot be written: {reason}; {existing} has {size(free)} free")
        cause = cause.__cause__ or cause.__context__
    return None


def free_space(path: Path) -> tuple[Path, int]:
    """Return the closest folder that exists, and the bytes that are free on its disk."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    return existing, shutil.disk_usage(existing).free


def size(num_bytes: float) -> str:
    """Return a number of bytes in GB, in MB below 1 GB, or in kB below 0.1 MB."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def _reason(error: BaseException) -> str | None:
    # The number is in the message of Rust's errors (safetensors, tokenizers).
    found = re.search(r"\(os error (\d+)\)$", str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return os.strerror(number)
    # torch.save does not report the reason. Its file is on a disk that it could write before.
    is_torch_save = isinstance(error, RuntimeError) and "unexpected pos" in str(error)
    return "torch.save failed, as on a full disk" if is_torch_save else None
