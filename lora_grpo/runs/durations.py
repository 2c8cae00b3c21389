"""Durations as text, and the time of a run with `--hours` by phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PHASES = {
    "start": "until the first step",
    "training": "training",
    "validation": "validation",
    "evaluation": "final evaluation",
}


def duration(seconds: float) -> str:
    """Format a duration: 41 s, 2 min 51 s or 1 h 48 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def time_table(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return phase, planned time and used time of a finished run with `--hours`, from its run.json; [] for others."""
    hours, budget = record["config"].get("hours"), record.get("time_budget") or {}
    planned, used = budget.get("planned") or {}, budget.get("used")
    if not hours or not used:
        return []
    rows = [(title, _cell(planned, phase), _cell(used, phase)) for phase, title in _PHASES.items()]
    total = sum(seconds for phase, seconds in used.items() if phase in _PHASES)
    return [*rows, ("in all", duration(3600 * hours), duration(total))]


def _cell(part: Mapping[str, float], phase: str) -> str:
    if phase not in part:
        return "–"
    return duration(part[phase]) + (f", {part['steps']:.0f} steps" if phase == "training" else "")
