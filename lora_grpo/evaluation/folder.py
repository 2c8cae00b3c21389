"""The folder of one evaluation: evaluation.json records the settings of each results file.

A folder contains one evaluation. An evaluation with other settings needs another folder. Only the model to compare with
may change; its results have their own file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
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
    """Raise UserError unless a folder can be used for a request. With `overwrite`, delete another evaluation in it."""
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
    old = state[RESULTS]["request"]
    changed = "; ".join(
        f"{name} was {json.dumps(old.get(name)):.40}, now {json.dumps(request.get(name)):.40}"
        for name in sorted(old.keys() | request.keys())
        if old.get(name) != request.get(name)
    )
    raise UserError(f"{folder} holds another evaluation: {changed}; pass another --output-dir, or --overwrite")


def environment(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the versions and hardware recorded by `start`, or None."""
    return _read(folder).get(name, {}).get("environment")


def start(folder: Path, name: str, request: Request, environment: Mapping[str, Any]) -> None:
    """Record the request and environment of a results file."""
    atomic.write_json(folder / STATE, _read(folder) | {name: {"request": request, "environment": environment}})


def copy_results(path: Path, request: Request, evaluations: Path) -> None:
    """Copy the results of the same request from another evaluation in a folder, unless `path` was started before.

    So a model that several others are compared with is sampled once. Missing results are sampled as after a kill.
    """
    if environment(path.parent, path.name) is not None:
        return
    for folder in sorted(state.parent for state in evaluations.glob(f"*/{STATE}")):
        with contextlib.suppress(UserError):  # a damaged file: the command that wrote that folder says so
            for name, entry in _read(folder).items():
                if entry["request"] == request and (folder / name).is_file():
                    start(path.parent, path.name, request, entry["environment"])
                    with atomic.new_file(path) as temporary:
                        shutil.copyfile(folder / name, temporary)
                    print(f"{path}: copied from {folder / name}", file=sys.stderr)
                    return


def _read(folder: Path) -> dict[str, Any]:
    state = json_files.read_object(folder / STATE) if (folder / STATE).exists() else {}
    for entry in state.values():
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), dict) for k in ("request", "environment")):
            raise UserError(f"{folder / STATE} is damaged; pass another --output-dir")
        if not isinstance(entry["environment"].get("isolation"), (str, type(None))) or not _is_finite(entry):
            raise UserError(f"{folder / STATE} has a wrong value; pass another --output-dir")
    return state


def _is_finite(entry: Mapping[str, Any]) -> bool:
    try:
        json.dumps(entry, allow_nan=False)
    except ValueError:
        return False
    return True
