"""Check that GGUF files are those of their last exports, and made from the adapter that the card describes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from lora_grpo.errors import UserError
from lora_grpo.gguf_export import GGUF_REPORT, exported_files
from lora_grpo.merging import read_report
from lora_grpo.models import BEST, adapter_sha256, source_adapter


def check_exported(folder: Path) -> None:
    """Raise a UserError if a GGUF file in a folder was left over from another adapter, or if its source is unknown.

    Files whose divergence was not measured, because their export was interrupted, are named on standard error. A folder
    without gguf_report.json was not written by an export, and is accepted.
    """
    folder = folder.resolve()
    if not (folder / GGUF_REPORT).is_file():
        return
    files, merge = exported_files(folder), read_report(folder)
    command = " ".join(["scripts/export_gguf.py", *_arguments(folder)])
    fix = f"run {command} again, and move or delete what it does not replace"
    made_from, expected = "the last export", merge.identity.get("adapter_sha256") if merge else None
    names = sorted(path.name for path in folder.glob("*.gguf"))
    # The export of a model without a merge report knows no adapter.
    unknown = [name for name in names if name not in files or (expected and not files[name].adapter_sha256)]
    if unknown:
        raise UserError(
            f"{folder}: {GGUF_REPORT} lists no such size and adapter for {', '.join(unknown)}, so the source is "
            f"unknown; {fix}"
        )
    adapter = source_adapter(folder)
    if (folder.parent / "run.json").is_file() and adapter.is_dir():
        made_from, expected = str(adapter), adapter_sha256(adapter)
    others = [name for name in names if files[name].adapter_sha256 not in (None, expected)]
    if expected and others:
        raise UserError(f"{folder}: {', '.join(others)}: made from another adapter than {made_from}; {fix}")
    for name, file in files.items():
        if file.kl is None and file.not_measured is None:
            print(f"note: {name} has no KL divergence; run {command} --type {file.type} to measure it", file=sys.stderr)


def _arguments(folder: Path) -> list[str]:
    """Return the arguments that export the files of a run again; none if the run is not known."""
    if not (folder.parent / "run.json").is_file():
        return []
    best = ["--what", "best"] if source_adapter(folder).name == BEST else []
    return [shlex.quote(str(folder.parent)), *best]
