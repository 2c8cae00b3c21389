"""Files and folders that are whole or absent, whatever moment the process is killed at."""

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
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused: no JSON reader takes them."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, from a model or from a file
        text = json.dumps(value, indent=2, allow_nan=False)
    write_text(path, text + "\n")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a staging folder beside `path`; when the block ends well it gets a manifest and becomes `path`.

    An older `path` is replaced. A block that raises leaves nothing behind.
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
    """Flush every file of `staging`, list them with their SHA-256 in a manifest, and rename the folder to `path`."""
    digests = {}
    for file in sorted(staging.rglob("*")):
        if file.is_file() and file != staging / MANIFEST:
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
            digests[file.relative_to(staging).as_posix()] = sha256(file)
    write_json(staging / MANIFEST, {"sha256": digests})
    if path.exists():
        shutil.rmtree(path)
    staging.rename(path)
    sync_folder(path.parent)


def damage(folder: Path) -> str | None:
    """Say what is wrong with a published folder, or None where every file is as it was written."""
    try:
        digests = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"no readable {MANIFEST}"
    for name, digest in digests.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if sha256(folder / name) != digest:
            return f"{name} is not as it was written"
    return None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut: the folder's entry is data of its own."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
