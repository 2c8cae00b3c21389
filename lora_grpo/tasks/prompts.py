"""Prompts without a right answer, for rewards that look at the completion alone (length, format, a pattern).

A source is a .jsonl file with `prompt`, `question` or `text`, or a text file with one prompt a line; without one, the
starter's word problems serve as prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lora_grpo.errors import UserError
from lora_grpo.tasks import starter
from lora_grpo.tasks.registry import Row, Verdict

_KEYS = ("prompt", "question", "text")


def load(split: str, source: str | None, limit: int | None, seed: int) -> list[Row]:
    """Return prompts as rows; see `lora_grpo.tasks.Task.load`."""
    if source is None:
        return starter.load(split, None, limit, seed)
    path = Path(source).expanduser()
    try:
        # Not splitlines(): a prompt may hold U+2028, which it takes for a line's end.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{source} cannot be read: {reason}; expected a .jsonl or text file of prompts") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt = _prompt(line, f"{source}:{number}") if path.suffix in (".jsonl", ".json") else line.strip()
            rows.append({"id": f"{path.stem}/{number}", "question": prompt, "answer": ""})
    if not rows:
        raise UserError(f"{source} holds no prompts; expected one a line")
    if limit is None or limit >= len(rows):
        return rows
    chosen = np.random.default_rng(seed).choice(len(rows), size=limit, replace=False)
    return [rows[place] for place in sorted(chosen.tolist())]


def grade(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Pass whatever says something: nothing here is right or wrong."""
    said = bool(completion.strip())
    return Verdict(passed=said, reason="answered" if said else "empty", extracted=None)


def gold_completion(row: Mapping[str, Any]) -> str:
    """Return a completion that `grade` accepts; there is no better one."""
    return "..."


def _prompt(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        raise UserError(f"{where}: not JSON; expected an object with one of {', '.join(_KEYS)}") from None
    for key in _KEYS:
        value = record.get(key) if isinstance(record, dict) else None
        if isinstance(value, str) and value.strip():
            return value
    raise UserError(f"{where}: none of {', '.join(_KEYS)} holds text")
