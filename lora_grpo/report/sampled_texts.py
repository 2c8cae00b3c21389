"""Collect all completions from training and evaluation for the page's completion browser."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from lora_grpo.runs import Line, RunFiles

MAX_SHOWN = 20_000
"""Maximum number of completions on one page."""
TRAINING, VALIDATION = "training", "validation"

_COLUMNS = (
    *("source", "step", "draw", "problem", "completion", "extracted", "passed", "status", "tokens", "truncated"),
    *("rewards", "reward"),
)


def sampled_texts(run: RunFiles, max_shown: int = MAX_SHOWN) -> dict[str, Any]:
    """Return about `max_shown` completions of a run: an evenly spaced, equal share of each step and each evaluation.

    Returns:
        `columns` and `rows` of completions, `problems` as [id, question, answer], the names of `rewards`, and the
        `total` number of completions in the run.
    """
    groups: dict[tuple[str, Any], list[Line]] = {}
    for source, lines in ((TRAINING, run.completions), (VALIDATION, run.validation)):
        for line in lines:
            groups.setdefault((source, line["step"]), []).append(line)
    for model, samples in run.samples.items():
        groups[(model, None)] = samples
    total = sum(map(len, groups.values()))
    rewards = list(dict.fromkeys(name for line in run.completions for name in line["rewards"]))
    problems: dict[tuple[Any, ...], int] = {}
    rows = []
    for (source, _), lines in groups.items():
        kept = len(lines) if total <= max_shown else math.ceil(len(lines) * max_shown / total)
        for index in range(kept):
            line = lines[index * len(lines) // kept]
            values = _trained(line, rewards) if source in (TRAINING, VALIDATION) else _evaluated(line, run.rows)
            values["problem"] = problems.setdefault(values["problem"], len(problems))
            values["source"] = source
            rows.append([_finite(values.get(name)) for name in _COLUMNS])
    return {"columns": _COLUMNS, "rows": rows, "problems": list(problems), "rewards": rewards, "total": total}


def embedded(value: Any) -> str:
    """Return JSON for a `<script>` element, escaped so that no character can end the element.

    The result is ASCII, which preserves lone surrogates and JavaScript line separators.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _trained(line: Line, rewards: Sequence[str]) -> dict[str, Any]:
    return {
        "step": line["step"],
        "problem": (line.get("id"), line.get("question"), _text(line.get("answer"))),
        "completion": str(line["completion"]),
        "extracted": _text(line.get("extracted")),
        "passed": line.get("passed"),
        "status": line.get("status"),
        "tokens": line.get("num_tokens"),
        "truncated": line.get("truncated"),
        "rewards": [_finite(line["rewards"].get(name)) for name in rewards],
        "reward": line.get("reward"),
    }


def _evaluated(sample: Line, rows: dict[str, Line]) -> dict[str, Any]:
    row = rows.get(sample["task_id"], {})
    response = sample.get("response")
    return {
        "draw": sample.get("draw"),
        "problem": (sample["task_id"], row.get("question"), _text(row.get("answer"))),
        "completion": str(sample["completion"] if response is None else response),
        # For code tasks, `completion` is the part of the response that was run.
        "extracted": _text(sample.get("extracted") if response is None else sample["completion"]),
        "passed": sample["passed"],
        "status": sample.get("status"),
        "tokens": sample.get("num_tokens"),
        "truncated": sample.get("truncated"),
    }


def _finite(value: Any) -> Any:
    """Replace NaN and infinity with None, because JSON does not support them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
