"""Prompts without correct answers, for rewards that depend only on the completion (length, format, a pattern).

A source is a JSON Lines file with `prompt`, `question`, or `text`, or a text file with one prompt per line. The default
source is the starter's word problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lora_grpo.errors import UserError
from lora_grpo.tasks import sources, starter
from lora_grpo.tasks.registry import Row, Verdict

_KEYS = ("prompt", "question", "text")


def load(split: str, source: str | None, limit: int | None, seed: int) -> list[Row]:
    """Return prompts as rows; see `Task.load`. All rows of a file are used for either split."""
    if source is None:
        return starter.load(split, None, limit, seed)
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json"):
        prompts = [(where, _prompt(record, where)) for where, record in sources.read_file(source, " or ".join(_KEYS))]
    else:
        prompts = _read_lines(path)
    rows = [
        {"id": f"{path.stem}/{where.rpartition(':')[2]}", "question": text, "answer": ""} for where, text in prompts
    ]
    if limit is None or limit >= len(rows):
        return rows
    chosen = np.random.default_rng(seed).choice(len(rows), size=limit, replace=False)
    return [rows[i] for i in sorted(chosen.tolist())]


def grade(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade a completion. Every non-empty completion passes."""
    answered = bool(completion.strip())
    return Verdict(answered, "answered" if answered else "empty")


def gold_completion(row: Mapping[str, Any]) -> str:
    """Return a completion that `grade` accepts."""
    return "..."


def _read_lines(path: Path) -> list[tuple[str, str]]:
    """Return the non-blank lines of a text file, each with its "file:line"."""
    try:
        # Not splitlines(): it also splits at U+2028, which a prompt may contain.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path} cannot be read: {reason}; expected a .jsonl or text file of prompts") from None
    prompts = [(f"{path}:{number}", line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise UserError(f"{path} has no prompts; expected one per line")
    return prompts


def _prompt(record: Any, where: str) -> str:
    for key in _KEYS:
        value = record.get(key) if isinstance(record, dict) else None
        if isinstance(value, str) and value.strip():
            return value
    raise UserError(f"{where}: none of {', '.join(_KEYS)} is a non-empty string")
