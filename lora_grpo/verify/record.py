"""What was verified, in the folder of a run: `RUN/verification.json`, which the model card reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lora_grpo import console
from lora_grpo.errors import first_line
from lora_grpo.files import atomic, json_files
from lora_grpo.models import ModelSpec, adapter_sha256, model_files
from lora_grpo.runs import now
from lora_grpo.verify.open_target import ENGINES
from lora_grpo.verify.report import VerifyReport

VERIFICATION = "verification.json"


def keep(report: VerifyReport, spec: ModelSpec) -> None:
    """Add the targets that use the adapter to the run's file. Without a run, nothing is kept.

    A file that cannot be written is a note.

    Raises:
        UserError: the file cannot be read.
    """
    run = spec.run_folder
    if run is None or spec.adapter is None:
        return
    entries = _read(run)
    for target in report.targets:
        name = _name_in(run, target.target)
        entries.pop(name, None)
        if target.uses_adapter:
            entries[name] = {
                "adapter_sha256": adapter_sha256(spec.adapter),
                "target_sha256": _target_sha256(target.target),
                "program": target.program,
                "weights": target.weight_type,
                "summary": target.summary,
                "result": asdict(target.result),
                "prompts": report.prompts,
                "verified": now(),
            }
    try:
        atomic.write_json(run / VERIFICATION, entries)
    except OSError as error:  # the run is of another user, for example
        console.note(f"note: {run / VERIFICATION} cannot be written ({first_line(error)}), so no card will say this")


def verified(run: Path, adapter: Path, folder: Path) -> list[str]:
    """Return a line for each verification of what is in a folder of a run, as it is now.

    Args:
        adapter: the adapter from which the folder was made, or the folder itself.
        folder: the adapter, or a merged model, or a folder of GGUF files.
    """
    current_adapter = adapter_sha256(adapter)
    lines = []
    for name, entry in _read(run).items():
        is_path = entry["target_sha256"] is not None
        path = run / name
        concerns_folder = folder in (path, path.parent) if is_path else folder == adapter
        if not concerns_folder or entry["adapter_sha256"] != current_adapter:
            continue
        if is_path and (not path.exists() or _target_sha256(str(path)) != entry["target_sha256"]):
            continue
        subject = Path(name).name if is_path else entry["program"]
        lines.append(f"{subject}: {entry['summary']}")
    return lines


def _read(run: Path) -> dict[str, Any]:
    path = run / VERIFICATION
    return json_files.read_object(path) if path.is_file() else {}


def _name_in(run: Path, target: str) -> str:
    """Return the path of a target relative to its run, or its name if it is not inside the run."""
    path = Path(target).expanduser().resolve()
    if target not in ENGINES and path.exists() and path.is_relative_to(run.resolve()):
        return str(path.relative_to(run.resolve()))
    return target


def _target_sha256(target: str) -> str | None:
    """Return a digest of the weights of a folder or a file; None for an engine or a server."""
    path = Path(target).expanduser()
    if target in ENGINES:
        return None
    if path.is_dir():
        return model_files.weights_fingerprint(path)
    return atomic.sha256(path) if path.is_file() else None
