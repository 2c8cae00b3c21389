"""The folder of one evaluation: evaluation.json records the settings of each results file.

A folder contains one evaluation. An evaluation with other settings needs another folder. Only the model to compare with
may change; its results have their own file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import atomic, json_files

STATE = "evaluation.json"
RESULTS = "results.jsonl"

Request = Mapping[str, Any]
"""Everything that determines the samples and verdicts of an evaluation, as plain JSON values."""


def digest(request: Request) -> str:
    """Return a hash of a request: 8 hexadecimal digits."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:8]


def check(folder: Path, request: Request, *, overwrite: bool) -> None:
    """Check that a folder can be used for a request. With `overwrite`, delete another evaluation in it.

    Raises:
        UserError: the folder contains other files or another evaluation. The message lists the settings that differ.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output-dir {folder} is a file; pass another --output-dir")
    held = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.exists() else []
    if held and not (folder / STATE).is_file():
        raise UserError(f"{folder} holds files that are not an evaluation; pass another --output-dir")
    state = _read(folder)
    if RESULTS not in state or state[RESULTS]["request"] == request:
        return
    if overwrite:
        for name in (*state, STATE, "report.json", "report.md"):
            (folder / name).unlink(missing_ok=True)
        return
    changed = _differences(state[RESULTS]["request"], request)
    raise UserError(f"{folder} holds another evaluation: {changed}; pass another --output-dir, or --overwrite")


def environment(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the versions and hardware recorded when a results file was started, or None if it was not started."""
    entry = _read(folder).get(name)
    return entry["environment"] if entry else None


def start(folder: Path, name: str, request: Request, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Record the request and environment of a results file, and return the environment.

    If the file was started before, print what changed in the environment and return the recorded one.
    """
    state = _read(folder)
    if name in state:
        known: dict[str, Any] = state[name]["environment"]
        if known != environment:
            print(f"since {name} was started: {_differences(known, environment)}", file=sys.stderr)
        return known
    state[name] = {"request": request, "environment": environment}
    atomic.write_json(folder / STATE, state)
    return dict(environment)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return each field that differs, as "temperature was 1.0, now 0.8"."""
    fields = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return "; ".join(f"{name} was {_short(old.get(name))}, now {_short(new.get(name))}" for name in fields)


def _read(folder: Path) -> dict[str, Any]:
    if not (folder / STATE).exists():
        return {}
    state = json_files.read_object(folder / STATE)
    if not all(isinstance(entry, dict) and {"request", "environment"} <= entry.keys() for entry in state.values()):
        raise UserError(f"{folder / STATE} was written by another version; pass another --output-dir")
    return state


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:17]}..."
