"""Read JSON Lines files of a run that may still be growing: metrics, completions, samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError

Line = dict[str, Any]


def read_lines(path: Path, required: Mapping[str, type]) -> tuple[list[Line], bool]:
    """Return the objects in a file, and whether its last line is complete.

    Args:
        path: the file. A missing file has no lines. An incomplete last line is skipped.
        required: keys that every line must have, with the type of each value.

    Raises:
        UserError: the file cannot be read, or a line other than the last is not such an object.
    """
    if not path.is_file():
        return [], True
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    values: list[Line] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in required.items()):
            values.append(value)
        elif number == len(lines):  # the last line has no newline
            return values, False
        else:
            expected = f"expected an object with {', '.join(required)}, got {line[:60]!r}"
            raise UserError(f"{path}:{number}: {expected}; delete the line")
    return values, True


def read_metrics(folder: Path) -> list[Line]:
    """Return the complete lines of a run's metrics.jsonl, one per training step.

    Raises:
        UserError: a line is damaged.
    """
    return read_lines(folder / "metrics.jsonl", {"step": int})[0]
