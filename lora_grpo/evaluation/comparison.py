"""Compare two models on the same tasks: what changed, whether it is significant, and how much comes from the format.

A trained model may pass more often because it is more often right, or only because it writes right answers in the
format that the grading rule reads. A sample is right in any format if it passes, or if it ended by itself without an
answer that the rule can read, and the `flexible` rule reads the right number. With the means over problems

    gain        = passed after - passed before
    other       = right in any format after - right in any format before
    from format = gain - other

`flexible` reads the last number of a text, which may be right by chance. It therefore counts only for samples without
a readable answer: an answer that was read and is wrong, a hedge or a truncated text stays wrong. Programs, and task
files without a `flexible` rule, are graded in one way only, so their format is not separated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lora_grpo.evaluation import pass_at_k
from lora_grpo.evaluation.measurement import UNPARSED, Bounds, Schema, counts_by_task, metrics
from lora_grpo.evaluation.results import Result, is_greedy

SIGNIFICANT = 0.05
"""Differences with a smaller p-value are reported as better or worse."""
FORMAT_NOTE = (
    "From the format: right answers that the grading rule could not read, before minus after. They are read as the "
    "last number of the text, which may be right by chance."
)


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
    def p_text(self) -> str:
        return "<0.001" if self.p_value < 0.001 else f"{self.p_value:.3f}"

    @property
    def verdict(self) -> str:
        """One sentence that says whether the metric changed."""
        change = f"{100 * self.difference:+.1f} points (p {self.p_text}, {self.test})"
        if self.is_significant:
            return f"{self.metric}: {'better' if self.difference > 0 else 'worse'}, {change}"
        power = "too few tasks to detect any change"
        if self.detectable is not None:
            power = f"this many tasks detect a change of {100 * self.detectable:.1f} points with 80% power"
        return f"{self.metric}: no significant difference, {change}; {power}"


class TaskChange(Schema):
    """A task that one model solves in at least half of its samples and the other does not."""

    task_id: str
    before: list[int]
    """Number of passed samples and number of samples."""
    after: list[int]


class Part(Schema):
    """The gain or a part of it, as a fraction."""

    name: str
    value: float
    interval: Bounds


def compare(before: Sequence[Result], after: Sequence[Result], ks: Iterable[int], seed: int) -> list[Comparison]:
    """Compare the samples of two models on the same tasks, metric by metric."""
    first, second = metrics(before, ks, seed), metrics(after, ks, seed)
    table = []
    for name in [name for name in first if name in second]:
        old, new = first[name], second[name]
        pair = old.values, new.values
        if old.is_one_sample and new.is_one_sample:
            test, p = "exact McNemar", pass_at_k.mcnemar_exact(*pair)
        else:
            test, p = "paired permutation", pass_at_k.paired_permutation(*pair, seed=seed)
        row = Comparison(
            metric=name,
            before=old.mean,
            before_interval=list(old.interval),
            after=new.mean,
            after_interval=list(new.interval),
            difference=float((new.values - old.values).mean()),
            difference_interval=list(pass_at_k.difference_interval(*pair, seed=seed)),
            p_value=p,
            test=test,
            detectable=pass_at_k.minimum_detectable_change(*pair),
        )
        table.append(row)
    return table


def task_changes(before: Sequence[Result], after: Sequence[Result]) -> tuple[list[TaskChange], list[TaskChange]]:
    """Return the fixed and the regressed tasks, largest change first.

    A task is fixed if less than half of its samples passed before and at least half pass after. A regressed task is the
    opposite. Greedy samples are used only if there are no other samples.
    """
    only_greedy = all(map(is_greedy, before))
    second = counts_by_task(after, greedy=only_greedy)
    changes = []
    for task, (total, passed) in counts_by_task(before, greedy=only_greedy).items():
        total_after, passed_after = second[task]
        change = TaskChange(task_id=task, before=[passed, total], after=[passed_after, total_after])
        changes.append((passed / total, passed_after / total_after, change))
    changes.sort(key=lambda rates: abs(rates[1] - rates[0]), reverse=True)
    fixed = [change for rate, rate_after, change in changes if rate < 0.5 <= rate_after]
    regressed = [change for rate, rate_after, change in changes if rate_after < 0.5 <= rate]
    return fixed, regressed


def split_gain(before: Sequence[Result], after: Sequence[Result], seed: int) -> list[Part]:
    """Return the gain between the samples of two models, the part from the format, and the other part.

    Greedy samples count only if there are no others. Empty if the format cannot be separated.
    """
    if not any("flexible" in result for result in before):
        return []
    only_greedy = all(map(is_greedy, before))

    def rates(results: Sequence[Result]) -> NDArray[np.float64]:
        counts = counts_by_task(results, greedy=only_greedy)
        return np.array([passed / total for total, passed in counts.values()])

    def in_any_format(results: Sequence[Result]) -> list[Result]:
        return [{**result, "passed": result["passed"] or _is_hidden(result)} for result in results]

    gain, other = rates(after) - rates(before), rates(in_any_format(after)) - rates(in_any_format(before))
    parts = []
    for name, changes in {"gain in pass@1": gain, "from the format": gain - other, "other": other}.items():
        # Each part is a mean over problems, so the paired bootstrap of a difference applies to it too.
        interval = pass_at_k.difference_interval(np.zeros(changes.size), changes, seed=seed)
        parts.append(Part(name=name, value=float(changes.mean()), interval=list(interval)))
    return parts


def percent(value: float, interval: Sequence[float], sign: str = "") -> str:
    """Format a fraction and its interval as percentages, such as "37.5 [12.0, 61.3]"."""
    return f"{100 * value:{sign}.1f} [{100 * interval[0]:{sign}.1f}, {100 * interval[1]:{sign}.1f}]"


def _is_hidden(result: Result) -> bool:
    """Return whether a sample ended with the right answer in a format that the rule could not read."""
    return result["status"] in UNPARSED and result.get("flexible") is True and not result.get("truncated")
