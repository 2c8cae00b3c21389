"""Metrics of one model's graded samples: pass@k with intervals, rules, statuses, and parsing failures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from lora_grpo.evaluation import pass_at_k
from lora_grpo.evaluation.results import GREEDY, RULES, Result, is_greedy

UNPARSED = ("empty", "no_answer", "unclosed_answer", "unreadable_answer", "no_code")
"""Statuses of completions without a readable answer."""

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
    """`pass@k` for each requested k, `greedy` and `mean score`, as fractions; see `metrics`."""
    intervals: dict[str, Bounds]
    curve: list[CurvePoint]
    """pass@k for more values of k."""
    tasks: int
    samples: int
    sample_stats: dict[str, dict[str, float]]
    """Counts of `greedy` samples, if the model also has others, and of `sampled` ones; see `_counts`."""
    source: dict[str, Any]
    """Where the samples come from: the model, SHA-256 of its weights, adapter or samples file, engine, hardware."""


def measure(
    label: str, results: Sequence[Result], source: Mapping[str, Any], ks: Iterable[int], seed: int
) -> Measurement:
    """Return the metrics of one model's graded samples. `ks` are the k of the scores; the curve has more."""
    found = metrics(results, ks, seed)
    curve = []
    if sampled := counts_by_task(results, greedy=False):
        most = min(total for total, _ in sampled.values())
        usual = {*range(1, 11), *(2**power for power in range(4, 20)), most}
        for k in sorted({*ks, *(k for k in usual if k <= most)}):
            point = _pass_rate(sampled, k, seed)
            curve.append(CurvePoint(k=k, value=point.mean, interval=list(point.interval)))
    by_kind: dict[str, list[Result]] = {}
    for result in results:
        by_kind.setdefault(GREEDY if is_greedy(result) else "sampled", []).append(result)
    return Measurement(
        label=label,
        scores={name: metric.mean for name, metric in found.items()},
        intervals={name: list(metric.interval) for name, metric in found.items()},
        curve=curve,
        tasks=len({result["task_id"] for result in results}),
        samples=len(results),
        sample_stats={kind: _counts(of_kind) for kind, of_kind in sorted(by_kind.items(), reverse=True)},
        source=dict(source),
    )


@dataclass(frozen=True)
class Metric:
    """The values of one metric on T tasks."""

    values: NDArray[np.float64]
    """(T,) fractions, in the order of task_id."""
    interval: pass_at_k.Interval
    """95% confidence interval of the mean."""
    is_one_sample: bool
    """Whether each value is that of one sample that passed or failed."""

    @property
    def mean(self) -> float:
        return float(self.values.mean())


def metrics(results: Sequence[Result], ks: Iterable[int], seed: int) -> dict[str, Metric]:
    """Return `pass@k` for each k, `greedy` if there are such samples, and `mean score` if the task gives scores.

    The mean score is that of the greedy samples only if there are no others.
    """
    sampled, greedy = (counts_by_task(results, greedy=greedy) for greedy in (False, True))
    found = {f"pass@{k}": _pass_rate(sampled, k, seed) for k in ks} if sampled else {}
    if greedy:
        found["greedy"] = _pass_rate(greedy, 1, seed)
    if any("score" in result for result in results):
        by_task: dict[str, list[float]] = {task: [] for task in sampled or greedy}
        for result in results:
            if not (sampled and is_greedy(result)):
                by_task[str(result["task_id"])].append(result.get("score", float(result["passed"])))
        values = np.array([statistics.fmean(scores) for scores in by_task.values()])
        found["mean score"] = Metric(values, pass_at_k.bootstrap_interval(values, seed=seed), is_one_sample=False)
    return found


def counts_by_task(results: Iterable[Result], *, greedy: bool) -> Counts:
    """Return (samples, passed) for each task, sorted by task_id, counting either greedy samples or all others."""
    total: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for result in results:
        if is_greedy(result) is greedy:
            total[str(result["task_id"])] += 1
            passed[str(result["task_id"])] += result["passed"]
    return {task: (total[task], passed[task]) for task in sorted(total)}


def _pass_rate(counts: Counts, k: int, seed: int) -> Metric:
    values, interval = pass_at_k.estimate_pass_at_k(list(counts.values()), k, seed)
    return Metric(values, interval, all(total == 1 for total, _ in counts.values()))


def _counts(results: Sequence[Result]) -> dict[str, float]:
    """Return the number of `samples` and how many pass each rule, have each status, are `unparsed` or `truncated`.

    If the task reads answers in several places, also how many pass by the place. `mean tokens` is a mean.
    """
    counts: dict[str, float] = {
        f"{rule} rule": sum(result.get(rule) is True for result in results) for rule in RULES if rule in results[0]
    }
    places = Counter(str(result["read_from"]) for result in results if result["passed"] and "read_from" in result)
    counts |= {f"passed, from a {place}": number for place, number in sorted(places.items())}
    counts |= sorted(Counter(str(result["status"]) for result in results).items())
    counts |= {"unparsed": sum(result["status"] in UNPARSED for result in results), "samples": len(results)}
    # Samples from other tools may use these keys with another meaning.
    lengths = [n for result in results if isinstance(n := result.get("num_tokens"), int) and 0 <= n < 2**32]
    if lengths:
        counts["truncated"] = sum(bool(result.get("truncated")) for result in results)
        counts["mean tokens"] = sum(lengths) / len(lengths)
    return counts
