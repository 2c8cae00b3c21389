"""merge_report.json: what a merged model's folder says of where it comes from, and whether that still is so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.subjects import adapter_sha256

REPORT = "merge_report.json"
FORMAT = 1


def read_report(folder: Path) -> dict[str, Any] | None:
    """Return the report in a folder, or None where there is none that this version reads."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) and report.get("lora_grpo_merge") == FORMAT else None


def check_current(folder: Path) -> None:
    """Refuse what a run's folder holds of an adapter that it no longer has: `merged`, and `gguf` made of that.

    Raises:
        UserError: says how to make it again.
    """
    report, adapter = read_report(folder), folder.parent / "adapter"
    if report is None or not (folder.parent / "run.json").is_file() or not adapter.is_dir():
        return
    if report["identity"]["adapter_sha256"] != adapter_sha256(adapter):
        raise UserError(
            f"{folder} was merged from another adapter than {adapter} now is; delete it and run scripts/merge.py "
            f"{folder.parent} again"
        )
