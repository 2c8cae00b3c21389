"""One-line errors for a full disk, before and during a write."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from lora_grpo.errors import UserError


def check_free_space(folder: Path, num_bytes: int) -> None:
    """Check that the disk that holds `folder` has `num_bytes` free. The folder may not exist yet.

    Raises:
        UserError: the disk has less free space.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise UserError(
            f"{existing} has {free / 1e9:.2f} GB free and needs {num_bytes / 1e9:.2f} GB; free some space, or pass "
            "an --output on another disk"
        )


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Convert an OSError raised while writing to `folder` into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk of {folder} is full; free some space and run the same command again") from None
        raise UserError(f"{error.filename or folder}: {error.strerror}; pass another --output") from error
