"""Collect all completions from training and evaluation for the page's completion browser."""

from __future__ import annotations

import json
import math
from typing import Any

from lora_grpo.runs import Line, RunFiles

MAX_SHOWN = 20_000
"""Maximum number of completions on one page."""

_COLUMNS = (
    *("source", "step", "sample_index", "problem", "completion", "extracted"),
    *("passed", "status", "tokens", "truncated", "rewards", "reward"),
)


def sampled_texts(run: RunFiles, max_shown: int = MAX_SHOWN) -> dict[str, Any]:
    """Return about `max_shown` completions of a run: an evenly spaced, equal share of each step and each evaluation.

    Returns:
        `columns` and `rows` of completions, `problems` as [id, question, answer], the names of `rewards`, and the
        `total` number of completions in the run.
    """
    groups: dict[tuple[str, Any], list[Line]] = {}
    for source, lines in (("training", run.completions), ("validation", run.validation)):
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
            row = line if "step" in line else {"id": line["task_id"], **run.rows.get(line["task_id"], {})}
            problem = (_text(row.get("id")), _text(row.get("question")), _text(row.get("answer")))
            completion, extracted = line["completion"], line.get("extracted")
            if line.get("response") is not None:  # for code tasks, `completion` is the part of it that was run
                completion, extracted = line["response"], completion
            values = {
                **line,
                "source": source,
                "problem": problems.setdefault(problem, len(problems)),
                "completion": completion,
                "extracted": _text(extracted),
                "tokens": line.get("num_tokens"),
                "rewards": [_finite(line["rewards"].get(name)) for name in rewards] if "rewards" in line else None,
            }
            rows.append([_finite(values.get(name)) for name in _COLUMNS])
    return {"columns": _COLUMNS, "rows": rows, "problems": list(problems), "rewards": rewards, "total": total}


def embedded(value: Any) -> str:
    """Return JSON for a `<script>` element, escaped so that no character can end the element.

    The result is ASCII, which preserves lone surrogates and JavaScript line separators.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: Any) -> Any:
    """Replace NaN and infinity with None, because JSON does not support them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
