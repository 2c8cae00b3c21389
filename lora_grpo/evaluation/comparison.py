"""Two models on the same tasks: what changed, and whether it can be told from chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lora_grpo.errors import UserError
from lora_grpo.evaluation import pass_at_k
from lora_grpo.evaluation.results import GREEDY, Result

SIGNIFICANT = 0.05
"""The p-value below which a difference is called one."""


def compare(before: Sequence[Result], after: Sequence[Result], ks: Iterable[int], seed: int) -> list[dict[str, Any]]:
    """Return one row of the table for pass@k of each k, and one for greedy decoding where there is any.

    Args:
        before: one model's samples.
        after: the other's, of the same tasks.
        ks: the k of pass@k.
        seed: of the resampling behind intervals and p-values.

    Returns:
        Rows with `metric`, `before`, `after`, their 95 % intervals, `difference` with its interval, `p_value`, the
        name of its `test`, and the smallest change that was `detectable` (None: none was).

    Raises:
        UserError: the tasks are not the same, or a k exceeds the samples of a task.
    """
    table = []
    drawn = [counts_by_task(part, greedy=False) for part in (before, after)]
    greedy = [counts_by_task(part, greedy=True) for part in (before, after)]
    for counts in (drawn, greedy):
        if counts[0].keys() != counts[1].keys():
            lost = len(counts[0].keys() ^ counts[1].keys())
            raise UserError(f"{lost} tasks have samples on one side alone; evaluate both models on the same tasks")
    if drawn[0]:
        table += [_row(f"pass@{k}", drawn, k, seed) for k in ks]
    if greedy[0]:
        table.append(_row("greedy", greedy, 1, seed))
    return table


def counts_by_task(results: Iterable[Result], *, greedy: bool) -> dict[str, tuple[int, int]]:
    """Return how many samples each task has and how many of them passed, by task_id and sorted by it."""
    total: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for result in results:
        if (result.get("draw") == GREEDY) is greedy:
            total[str(result["task_id"])] += 1
            passed[str(result["task_id"])] += result["passed"]
    return {task: (total[task], passed[task]) for task in sorted(total)}


def task_changes(before: Sequence[Result], after: Sequence[Result]) -> dict[str, list[dict[str, Any]]]:
    """Return the tasks that were fixed and those that regressed, those that moved most first.

    A task is fixed where fewer than half of its samples passed before and at least half do now; regressed the other way
    round. Greedy samples decide where there are only such.

    Returns:
        `fixed` and `regressed`: `task_id`, and `before` and `after` as [passed, samples].
    """
    only_greedy = all(result.get("draw") == GREEDY for result in before)
    first, second = (counts_by_task(part, greedy=only_greedy) for part in (before, after))
    moved: dict[str, list[dict[str, Any]]] = {"fixed": [], "regressed": []}
    for task, (total, passed) in first.items():
        total_after, passed_after = second[task]
        was, is_now = 2 * passed >= total, 2 * passed_after >= total_after
        if was != is_now:
            entry = {"task_id": task, "before": [passed, total], "after": [passed_after, total_after]}
            moved["fixed" if is_now else "regressed"].append(entry)
    for entries in moved.values():
        entries.sort(key=_change, reverse=True)
    return moved


def verdict(row: dict[str, Any]) -> str:
    """Say in one sentence what a row of the table comes to."""
    points = f"{100 * row['difference']:+.1f} points"
    if row["p_value"] < SIGNIFICANT:
        word = "better" if row["difference"] > 0 else "worse"
        return f"{row['metric']}: {word}, {points} (p {p_value(row['p_value'])}, {row['test']})"
    could = (
        f"a change of {100 * row['detectable']:.1f} points would have been told 4 times in 5"
        if row["detectable"] is not None
        else "no change could have been told with so few tasks"
    )
    return f"{row['metric']}: not distinguishable, {points} (p {p_value(row['p_value'])}, {row['test']}); {could}"


def p_value(value: float) -> str:
    """Write a p-value as tables do."""
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def estimate(counts: dict[str, tuple[int, int]], k: int, seed: int) -> tuple[Any, pass_at_k.Interval]:
    """Return pass@k of every task, and the 95 % interval of their mean.

    Args:
        counts: samples and passes by task.
        k: at most the smallest number of samples.
        seed: of the resampling behind the interval of several samples a task; one a task has Wilson's.
    """
    total, passed = (np.array(column) for column in zip(*counts.values(), strict=True))
    values = pass_at_k.per_task_pass_at_k(total, passed, k)
    if total.max() == 1:
        return values, pass_at_k.wilson_interval(int(passed.sum()), len(total))
    return values, pass_at_k.bootstrap_interval(values, seed=seed)


def _change(entry: dict[str, Any]) -> float:
    (before, total), (after, total_after) = entry["before"], entry["after"]
    return abs(after / total_after - before / total)


def _row(metric: str, counts: list[dict[str, tuple[int, int]]], k: int, seed: int) -> dict[str, Any]:
    (before, low_high), (after, low_high_after) = (estimate(part, k, seed) for part in counts)
    once = all(total == 1 for part in counts for total, _ in part.values())
    test = "exact McNemar" if once else "paired permutation"
    return {
        "metric": metric,
        "before": float(before.mean()),
        "before_interval": list(low_high),
        "after": float(after.mean()),
        "after_interval": list(low_high_after),
        "difference": float((after - before).mean()),
        "difference_interval": list(pass_at_k.difference_interval(before, after, seed=seed)),
        "p_value": pass_at_k.mcnemar_exact(before, after)
        if once
        else pass_at_k.paired_permutation(before, after, seed=seed),
        "test": test,
        "detectable": pass_at_k.minimum_detectable_change(before, after),
    }
