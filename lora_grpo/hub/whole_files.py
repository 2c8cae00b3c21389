"""That files are what they were written as: nobody gets half a model from a repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import INDEX, MANIFEST, damage, file_tensors, model_tensors
from lora_grpo.hub.upload_files import UploadFile


def check(folder: Path, kind: str, files: Sequence[UploadFile], merge: Mapping[str, Any]) -> None:
    """Refuse files that are cut off, damaged or something else than they are called.

    Args:
        folder: what is pushed.
        kind: which of `upload_files.KINDS` it is.
        files: those of it that go up; their digests are kept for the upload.
        merge: merge_report.json; empty where there is none.

    Raises:
        UserError: names the file.
    """
    if kind == "adapter" and (folder / MANIFEST).is_file() and (wrong := damage(folder)):
        raise UserError(
            f"{folder}: {wrong}; put back what training wrote, or delete {MANIFEST} there if the change is meant"
        )
    for file in files:
        path = folder / file.name
        if path.suffix == ".safetensors":
            file_tensors(path)
        elif path.suffix == ".gguf":
            with path.open("rb") as opened:
                if opened.read(4) != b"GGUF":
                    raise UserError(f"{path} is not a GGUF file; make it again with scripts/export_gguf.py")
    if kind == "merged":
        if (folder / INDEX).is_file():
            model_tensors(folder)
        _check_shards(folder, files, merge)


def _check_shards(folder: Path, files: Sequence[UploadFile], merge: Mapping[str, Any]) -> None:
    """Hold a merged model's weights against what its merge noted of them."""
    named = {file.name: file for file in files}
    for shard in merge.get("shards") or ():
        file = named.get(shard["file"])
        if file is None or file.size != shard["bytes"] or file.sha256 != shard["sha256"]:
            state = "missing" if file is None else "not as the merge wrote it"
            raise UserError(f"{folder / shard['file']} is {state}; delete {folder} and merge again")
