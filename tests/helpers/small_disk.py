"""A disk of a few megabytes, and what fills it."""

import contextlib
import shutil
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(folder, megabytes):
    """Mount a disk in memory at `folder`; skip the test where that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", folder]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder, left=0):
    """Leave this many bytes free. Deleting the file that is returned frees the rest."""
    filler = folder / ".filler"
    with filler.open("wb") as file:
        remaining = shutil.disk_usage(folder).free - left
        while remaining > 0:
            remaining -= file.write(bytes(min(remaining, 1 << 20)))
    return filler
