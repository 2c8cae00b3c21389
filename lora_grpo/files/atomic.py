"""Atomic writes: files and folders are complete or absent, even if the process is killed or the disk is full."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_grpo.files import disk

MANIFEST = "manifest.json"
"""File in a published folder with the SHA-256 digests of its other files."""


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file; see `new_file`."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON; see `new_file`. NaN and infinity raise ValueError."""
    # In ASCII, because a model's text may contain a lone surrogate, which UTF-8 cannot encode.
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file written there is flushed and renamed to `path` when the block ends."""
    temporary = path.with_name(f".{path.name}.partial")
    with disk.writing(path):
        try:
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a staging folder that becomes `path`, with a manifest, when the block ends.

    An existing `path` is replaced. If the block raises, nothing changes.
    """
    with staging_folder(path) as staging:
        yield staging
        publish(staging, path)


@contextlib.contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`, which the block may rename to it. It is removed otherwise."""
    staging = path.with_name(f".{path.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    with disk.writing(path):
        try:
            staging.mkdir(parents=True)
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, path: Path) -> None:
    """Flush every file of `staging`, write a manifest of their SHA-256 digests, and rename the folder to `path`."""
    digests = {}
    for file in sorted(staging.rglob("*")):
        if file.is_file() and file != staging / MANIFEST:
            sync(file)
            name = file.relative_to(staging).as_posix()
            digests[name] = sha256(file)
    write_json(staging / MANIFEST, {"sha256": digests})

    if path.exists():
        shutil.rmtree(path)
    staging.rename(path)
    sync(path.parent)


def damage(folder: Path) -> str | None:
    """Return the first difference between a published folder and its manifest, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        digests = dict(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"no readable {MANIFEST}"
    for name, digest in digests.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if sha256(file) != digest:
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
