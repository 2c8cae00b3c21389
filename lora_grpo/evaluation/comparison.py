"""Compare two models on the same tasks: what changed, and whether the change is significant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lora_grpo.evaluation import pass_at_k
from lora_grpo.evaluation.measurement import Bounds, Metric, Schema, counts_by_task, metrics
from lora_grpo.evaluation.results import Result, is_greedy

SIGNIFICANT = 0.05
"""Differences with a smaller p-value are reported as better or worse."""


class Comparison(Schema):
    """One metric of two models. Rates are fractions."""

    metric: str
    before: float
    before_interval: Bounds
    after: float
    after_interval: Bounds
    difference: float
    """After minus before."""
    difference_interval: Bounds
    p_value: float
    """Two-sided p-value of the paired `test`."""
    test: str
    detectable: float | None = None
    """The smallest change that this number of tasks detects with 80% power, or None if no change can be detected."""

    @property
    def is_significant(self) -> bool:
        return self.p_value < SIGNIFICANT

    @property
    def verdict(self) -> str:
        """One sentence that says whether the metric changed."""
        change = f"{100 * self.difference:+.1f} points (p {_p_value(self.p_value)}, {self.test})"
        if self.is_significant:
            return f"{self.metric}: {'better' if self.difference > 0 else 'worse'}, {change}"
        power = "too few tasks to detect any change"
        if self.detectable is not None:
            power = f"this many tasks detect a change of {100 * self.detectable:.1f} points with 80% power"
        return f"{self.metric}: no significant difference, {change}; {power}"

    @property
    def cost(self) -> str:
        """The points that the metric loses, with their interval, such as "1.2 points of pass@1 [0.3, 2.1]"."""
        high, low = (-100 * bound for bound in self.difference_interval)
        return f"{-100 * self.difference:z.1f} points of {self.metric} [{low:z.1f}, {high:z.1f}]"

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table: metric, before, after, difference, p-value."""
        return (
            self.metric,
            percent(self.before, self.before_interval),
            percent(self.after, self.after_interval),
            percent(self.difference, self.difference_interval, "+"),
            _p_value(self.p_value),
        )


class TaskChange(Schema):
    """A task that one model solves in at least half of its samples and the other does not."""

    task_id: str
    before: list[int]
    """Number of passed samples and number of samples."""
    after: list[int]


def compare(before: Sequence[Result], after: Sequence[Result], ks: Iterable[int], seed: int) -> list[Comparison]:
    """Compare the samples of two models on the same tasks, metric by metric."""
    first, second = metrics(before, ks, seed), metrics(after, ks, seed)
    return [_compare(name, first[name], second[name], seed) for name in first if name in second]


def task_changes(before: Sequence[Result], after: Sequence[Result]) -> tuple[list[TaskChange], list[TaskChange]]:
    """Return the fixed and the regressed tasks, largest change first.

    A task is fixed if less than half of its samples passed before and at least half pass after. A regressed task is the
    opposite. Greedy samples are used only if there are no other samples.
    """
    only_greedy = all(map(is_greedy, before))
    first, second = (counts_by_task(part, greedy=only_greedy) for part in (before, after))
    changes = []
    for task, (total, passed) in first.items():
        total_after, passed_after = second[task]
        change = TaskChange(task_id=task, before=[passed, total], after=[passed_after, total_after])
        changes.append((passed / total, passed_after / total_after, change))
    changes.sort(key=lambda rates: abs(rates[1] - rates[0]), reverse=True)
    fixed = [change for rate, rate_after, change in changes if rate < 0.5 <= rate_after]
    regressed = [change for rate, rate_after, change in changes if rate_after < 0.5 <= rate]
    return fixed, regressed


def percent(value: float, interval: Sequence[float], sign: str = "") -> str:
    """Format a fraction and its interval as percentages, such as "37.5 [12.0, 61.3]"."""
    return f"{100 * value:{sign}.1f} [{100 * interval[0]:{sign}.1f}, {100 * interval[1]:{sign}.1f}]"


def _p_value(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _compare(name: str, before: Metric, after: Metric, seed: int) -> Comparison:
    pair = before.values, after.values
    if before.is_one_sample and after.is_one_sample:
        test, p = "exact McNemar", pass_at_k.mcnemar_exact(*pair)
    else:
        test, p = "paired permutation", pass_at_k.paired_permutation(*pair, seed=seed)
    return Comparison(
        metric=name,
        before=before.mean,
        before_interval=list(before.interval),
        after=after.mean,
        after_interval=list(after.interval),
        difference=float((after.values - before.values).mean()),
        difference_interval=list(pass_at_k.difference_interval(*pair, seed=seed)),
        p_value=p,
        test=test,
        detectable=pass_at_k.minimum_detectable_change(*pair),
    )
