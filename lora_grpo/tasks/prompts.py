"""Prompts without correct answers, for rewards that depend only on the completion (length, format, a pattern).

A source has records with `prompt`. The default source is the starter's word problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_grpo.tasks import sources, starter
from lora_grpo.tasks.registry import Row, Verdict


def load(split: str, source: str | None = None) -> list[Row]:
    """Return prompts as rows; see `Task.load`. All rows of a file are used for either split."""
    if source is None:
        return starter.load(split)
    rows = []
    for index, (where, record) in enumerate(sources.read(source, split)):
        (prompt,) = sources.texts(record, ("prompt",), where)
        rows.append({"id": f"prompts/{index}", "question": prompt, "answer": ""})
    return rows


def check(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade a completion. Every non-empty completion passes."""
    answered = bool(completion.strip())
    return Verdict(answered, "answered" if answered else "empty")


def gold(row: Mapping[str, Any]) -> str:
    """Return a completion that `check` accepts."""
    return "..."
