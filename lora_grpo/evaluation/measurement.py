"""Metrics of one model's graded samples: pass@k with intervals, rules, statuses, and parsing failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lora_grpo.evaluation import pass_at_k
from lora_grpo.evaluation.results import GREEDY, Result

UNPARSED = ("empty", "no_answer", "unclosed_answer", "unreadable_answer", "no_code")
"""Statuses of completions without a readable answer."""
_RULES = ("strict", "flexible", "robust")

Bounds = Annotated[list[float], Field(min_length=2, max_length=2)]
"""Lower and upper bound of a 95% interval, as fractions."""
Counts = dict[str, tuple[int, int]]
"""(samples, passed) by task_id."""


class Schema(BaseModel):
    """Part of report.json: strict types, finite numbers, unknown keys ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class CurvePoint(Schema):
    """pass@k at one k."""

    k: int
    value: float
    interval: Bounds


class Measurement(Schema):
    """The metrics of one model."""

    label: str
    scores: dict[str, float]
    """`pass@k` for each requested k, and `greedy` if there are greedy samples, as fractions."""
    intervals: dict[str, Bounds]
    curve: list[CurvePoint]
    """pass@k for more values of k."""
    tasks: int
    samples: int
    statuses: dict[str, int]
    """Number of samples by the reason for their verdict."""
    rules: dict[str, int]
    """Number of samples that pass each rule of the task."""
    health: dict[str, float]
    """Number of samples that are `unparsed` or `truncated`, and `mean_tokens`."""
    source: dict[str, Any]
    """Where the samples come from: the model, SHA-256 of its weights, adapter or samples file, engine, hardware."""


def measure(
    label: str, results: Sequence[Result], source: Mapping[str, Any], ks: Iterable[int], seed: int
) -> Measurement:
    """Return the metrics of one model's graded samples. `ks` are the k of the scores; the curve has more."""
    estimates = {metric: _estimate(counts, k, seed) for metric, (counts, k) in metrics(results, ks).items()}
    curve = []
    if sampled := counts_by_task(results, greedy=False):
        for k in sorted({*ks, *_curve_ks(min(total for total, _ in sampled.values()))}):
            value, interval = _estimate(sampled, k, seed)
            curve.append(CurvePoint(k=k, value=value, interval=interval))
    statuses = Counter(str(result["status"]) for result in results)
    return Measurement(
        label=label,
        scores={metric: value for metric, (value, _) in estimates.items()},
        intervals={metric: interval for metric, (_, interval) in estimates.items()},
        curve=curve,
        tasks=len({result["task_id"] for result in results}),
        samples=len(results),
        statuses=dict(sorted(statuses.items())),
        rules={rule: sum(result[rule] for result in results) for rule in _RULES if rule in results[0]},
        health=_health(results, statuses),
        source=dict(source),
    )


def metrics(results: Iterable[Result], ks: Iterable[int]) -> dict[str, tuple[Counts, int]]:
    """Return (samples, passed) by task and the k of each metric: `pass@k`, and `greedy` if there are such samples."""
    sampled, greedy = (counts_by_task(results, greedy=greedy) for greedy in (False, True))
    found = {f"pass@{k}": (sampled, k) for k in ks} if sampled else {}
    return found | ({"greedy": (greedy, 1)} if greedy else {})


def counts_by_task(results: Iterable[Result], *, greedy: bool) -> Counts:
    """Return (samples, passed) for each task, sorted by task_id, counting either greedy samples or all others."""
    total: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for result in results:
        if (result.get("draw") == GREEDY) is greedy:
            total[str(result["task_id"])] += 1
            passed[str(result["task_id"])] += result["passed"]
    return {task: (total[task], passed[task]) for task in sorted(total)}


def _estimate(counts: Counts, k: int, seed: int) -> tuple[float, list[float]]:
    values, interval = pass_at_k.estimate(list(counts.values()), k, seed)
    return float(values.mean()), list(interval)


def _health(results: Sequence[Result], statuses: Counter[str]) -> dict[str, float]:
    health: dict[str, float] = {"unparsed": sum(statuses[status] for status in UNPARSED)}
    # Samples from other tools may use these keys with another meaning.
    lengths = [result["num_tokens"] for result in results if isinstance(result.get("num_tokens"), int)]
    if lengths:
        health["truncated"] = sum(bool(result.get("truncated")) for result in results)
        health["mean_tokens"] = sum(lengths) / len(lengths)
    return health


def _curve_ks(fewest: int) -> set[int]:
    """Return every k up to 10, then powers of two, and the largest possible k."""
    return {k for k in (*range(1, 11), *(2**power for power in range(4, 20)), fewest) if k <= fewest}
