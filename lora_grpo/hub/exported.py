"""Check that GGUF files were made from the adapter and the merge that the card describes."""

from __future__ import annotations

import sys
from pathlib import Path

from lora_grpo.commands import command
from lora_grpo.errors import UserError
from lora_grpo.gguf import GGUF_REPORT, LORA_FILE, exported_files
from lora_grpo.merging import read_report
from lora_grpo.models import adapter_sha256, source_adapter


def check_exported(folder: Path) -> None:
    """Raise a UserError if a GGUF file in a folder was left over from another adapter, or if its source is unknown.

    Files whose divergence was not measured, because their export was interrupted, are named on standard error. A folder
    without gguf_report.json is accepted as it is.
    """
    folder = folder.resolve()
    if not (folder / GGUF_REPORT).is_file():
        return
    fix = f"run {command('export-gguf')} again, and move or delete what it does not replace"
    files, merge, adapter = exported_files(folder), read_report(folder), source_adapter(folder)
    # The export of a model without a merge report knows no adapter.
    made_from, expected = "the last export", merge.identity.get("adapter_sha256") if merge else None
    if (folder.parent / "run.json").is_file() and adapter.is_dir():
        made_from, expected = str(adapter), adapter_sha256(adapter)
    names = sorted(path.name for path in folder.glob("*.gguf") if path.name != LORA_FILE)  # refused elsewhere
    unknown = [name for name in names if name not in files or (expected and not files[name].adapter_sha256)]
    if unknown:
        raise UserError(
            f"{folder}: {GGUF_REPORT} lists no such size and adapter for {', '.join(unknown)}, so the source is "
            f"unknown; {fix}"
        )
    if others := [name for name in names if files[name].adapter_sha256 != expected]:
        raise UserError(f"{folder}: {', '.join(others)}: made from another adapter than {made_from}; {fix}")
    onto, dtype = (merge.onto, merge.dtype) if merge else (None, None)
    if others := [name for name in names if (files[name].onto, files[name].dtype) != (onto, dtype)]:
        raise UserError(
            f"{folder}: {', '.join(others)}: made from another merge than the last export ({onto}, {dtype}); {fix}"
        )
    for name, file in files.items():
        if file.kl is None and file.not_measured is None:
            print(f"note: the export of {name} was interrupted; export it again for its KL divergence", file=sys.stderr)
