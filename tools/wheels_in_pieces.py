"""Bring packages to a machine without a network when only a certain number of MiB can travel at a time.

    python -m pip download --no-deps --only-binary=:all: --dest wheels -r requirements-gpu.lock
    python tools/wheels_in_pieces.py cut wheels --into pieces --mib 48     # pieces/001, pieces/002, ...
    python tools/wheels_in_pieces.py join pieces --into wheels             # there, when all have come
    python -m pip install --no-index --no-deps wheels/*.whl

`cut` fills numbered folders with files, and with parts of larger ones; each folder travels on its own. The downloads
must fit the other machine: `pip download --python-version 3.12 --platform manylinux_2_28_x86_64` chooses for another
Python. `join` may run after each arrival: it joins what is complete, checks SHA-256, and names what is missing, with
exit code 1. Models and data sets are files, too.

requirements-gpu.lock are several GB. If the machine has a PyTorch, leave out torch, triton and nvidia-*.
"""

import hashlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.cli import run_command
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import atomic, json_files
from lora_grpo.flags import read_flags

MANIFEST = "manifest.json"
"""In every numbered folder: the SHA-256 and the size of every file, and the number of its parts."""
_MIB = 1024**2


@dataclass(frozen=True)
class CutOptions:
    into: Path
    """Folder for the numbered folders."""
    mib: int = 48
    """Largest size of a numbered folder in MiB, without its manifest."""


@dataclass(frozen=True)
class JoinOptions:
    into: Path
    """Folder for the files."""


def main() -> None:
    verbs = ("cut", "join")
    if len(sys.argv) < 3 or sys.argv[1] not in verbs or sys.argv[2].startswith("-"):
        if {"-h", "--help"} & set(sys.argv):
            print(__doc__)
            return
        raise UserError(f"got {' '.join(sys.argv[1:]) or 'no arguments'}; expected {' or '.join(verbs)}, and a folder")
    verb, folder, *flags = sys.argv[1:]
    if verb == "cut":
        options = read_flags(CutOptions, flags, __doc__)
        numbered = cut(Path(folder), options.into, options.mib * _MIB)
        print(f"cut       {len(numbered)} folders in {options.into}")
    else:
        join_options = read_flags(JoinOptions, flags, __doc__)
        missing = join(Path(folder), join_options.into)
        print(f"joined    {join_options.into}")
        if missing:
            raise RunError(f"parts are missing of {', '.join(missing)}; bring the other folders")


def cut(source: Path, target: Path, max_bytes: int) -> list[Path]:
    """Write the files of a folder into numbered folders of at most `max_bytes`, and return these."""
    files = sorted(path for path in source.iterdir() if path.is_file())
    if not files:
        raise UserError(f"{source} has no files; expected wheels, as `pip download` writes them")
    shutil.rmtree(target, ignore_errors=True)
    folders: list[Path] = []
    room = 0
    manifest: dict[str, Any] = {}
    for path in files:
        parts = 0
        with path.open("rb") as file:
            while chunk := file.read(room or max_bytes):
                if len(chunk) > room:
                    folders.append(target / f"{len(folders) + 1:03d}")
                    folders[-1].mkdir(parents=True)
                    room = max_bytes
                (folders[-1] / f"{path.name}.part{parts:03d}").write_bytes(chunk)
                room -= len(chunk)
                parts += 1
        manifest[path.name] = {"sha256": atomic.sha256(path), "bytes": path.stat().st_size, "parts": parts}
    for folder in folders:
        atomic.write_json(folder / MANIFEST, manifest)
    return folders


def join(source: Path, target: Path) -> list[str]:
    """Write the files whose parts are all there, and return the names of the others.

    Raises:
        RunError: a file is damaged.
    """
    manifests = sorted(source.glob(f"*/{MANIFEST}"))
    if not manifests:
        raise UserError(f"{source} has no {MANIFEST}; expected the numbered folders that `cut` wrote")
    target.mkdir(parents=True, exist_ok=True)
    missing = []
    for name, facts in json_files.read_object(manifests[0]).items():
        if (target / name).exists():
            continue
        parts = sorted(source.glob(f"*/{name}.part*"), key=lambda part: part.name)
        if len(parts) < facts["parts"]:
            missing.append(name)
            continue
        digest = hashlib.sha256()
        with atomic.new_file(target / name) as temporary, temporary.open("wb") as file:
            for part in parts:
                data = part.read_bytes()
                digest.update(data)
                file.write(data)
            if digest.hexdigest() != facts["sha256"]:
                raise RunError(f"{name} is damaged: another SHA-256 than in {MANIFEST}; bring its folders again")
    return missing


if __name__ == "__main__":
    sys.exit(run_command(main))
