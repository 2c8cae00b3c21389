"""Atomic writes: files and folders are complete or absent, even if the process is killed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name in the same folder, flush it to disk, then rename it into place."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON. NaN and infinity raise ValueError."""
    # ASCII, because a model's text may contain a lone surrogate, which UTF-8 cannot encode.
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a staging folder that becomes `path`, with a manifest, when the block ends.

    An existing `path` is replaced. If the block raises, nothing changes.
    """
    staging = path.with_name(f".{path.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        publish(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, path: Path) -> None:
    """Flush every file of `staging`, write a manifest of their SHA-256 digests, and rename the folder to `path`."""
    digests = {}
    for file in sorted(staging.rglob("*")):
        if file.is_file() and file != staging / MANIFEST:
            sync(file)
            digests[file.relative_to(staging).as_posix()] = sha256(file)
    write_json(staging / MANIFEST, {"sha256": digests})
    if path.exists():
        shutil.rmtree(path)
    staging.rename(path)
    sync(path.parent)


def damage(folder: Path) -> str | None:
    """Compare a published folder with its manifest. Return the first difference, or None if there is none."""
    try:
        digests = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"no readable {MANIFEST}"
    for name, digest in digests.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if sha256(folder / name) != digest:
            return f"{name} has changed since it was written"
    return None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
