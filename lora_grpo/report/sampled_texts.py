"""Everything that the model wrote, in training and in evaluation, as the page's browser reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from lora_grpo.runs import Line, RunFiles

MOST_SHOWN = 20_000
"""Completions on one page."""
TRAINING, HELD_OUT = "training", "held out"

_COLUMNS = (
    *("source", "step", "draw", "problem", "completion", "extracted", "passed", "status", "tokens", "truncated"),
    *("rewards", "reward"),
)


def sampled_texts(run: RunFiles, most: int = MOST_SHOWN) -> dict[str, Any]:
    """Return the completions with what is known of each, every prompt once.

    Args:
        run: the run.
        most: completions that are kept, of each step and each evaluation as nearly the same number as there are, evenly
            over their order.

    Returns:
        `columns` and `rows` of completions, `problems` as [id, question, answer], `sources` and `rewards` by name, and
        the `total` that the run has.
    """
    groups: dict[tuple[str, Any], list[Line]] = {}
    for source, found in ((TRAINING, run.completions), (HELD_OUT, run.validation)):
        for line in found:
            groups.setdefault((source, line["step"]), []).append(line)
    for name, samples in run.samples.items():
        groups[(name, None)] = samples
    kept = _shares([len(lines) for lines in groups.values()], most)
    rewards = list(dict.fromkeys(name for line in run.completions for name in line["rewards"]))
    problems: dict[tuple[Any, ...], int] = {}
    rows = []
    for ((source, _), lines), number in zip(groups.items(), kept, strict=True):
        for place in range(number):
            line = lines[place * len(lines) // number]
            values = _trained(line, rewards) if source in (TRAINING, HELD_OUT) else _evaluated(line, run.rows)
            values["problem"] = problems.setdefault(values["problem"], len(problems))
            values["source"] = source
            rows.append([_finite(values.get(name)) for name in _COLUMNS])
    return {
        "columns": _COLUMNS,
        "rows": rows,
        "problems": list(problems),
        "rewards": rewards,
        "total": sum(map(len, groups.values())),
    }


def embedded(value: Any) -> str:
    """Return JSON that can stand in a `<script>` element: no character of it can end the element or be lost.

    It is ASCII, so that half of a surrogate pair, and what JavaScript takes for an end of line, come through.
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


def _evaluated(sample: Line, asked: dict[str, Line]) -> dict[str, Any]:
    row = asked.get(sample["task_id"], {})
    response = sample.get("response")
    return {
        "draw": sample.get("draw"),
        "problem": (sample["task_id"], row.get("question"), _text(row.get("answer"))),
        "completion": str(sample["completion"] if response is None else response),
        # Of a program, `completion` is the part of the response that ran.
        "extracted": _text(sample.get("extracted") if response is None else sample["completion"]),
        "passed": sample["passed"],
        "status": sample.get("status"),
        "tokens": sample.get("num_tokens"),
        "truncated": sample.get("truncated"),
    }


def _shares(sizes: Sequence[int], most: int) -> list[int]:
    """Share places out: small groups keep all they have, and the others the same number each, the first one more."""
    shares = [0] * len(sizes)
    left = min(most, sum(sizes))
    while left:
        hungry = [place for place, size in enumerate(sizes) if shares[place] < size]
        each = left // len(hungry)
        if not each:
            for place in hungry[:left]:
                shares[place] += 1
            break
        for place in hungry:
            given = min(each, sizes[place] - shares[place])
            shares[place] += given
            left -= given
    return shares


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
