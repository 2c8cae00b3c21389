"""Metrics of one model's graded samples, and the comparison of two models on the same tasks.

A trained model may pass more often because it is more often correct, or only because it writes correct answers in the
format that the grading rule reads. A sample is correct in any format if it passes, or if it ended by itself without an
answer that the rule can read, and the `flexible` rule reads the correct number. With the means over problems

    gain        = passed after - passed before
    other       = correct in any format after - correct in any format before
    from format = gain - other

`flexible` reads the last number of a text, which may be correct by chance. It therefore counts only for samples without
a readable answer: an answer that was read and is wrong, a hedge or a truncated text counts as wrong. Programs, and task
files without a `flexible` rule, are graded in one way only, so their format is not separated.
"""

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

UNPARSED = ("empty", "no_answer", "unclosed_answer", "unreadable_answer", "no_code", "unfinished_thought")
"""Statuses of completions without a readable answer."""

SIGNIFICANT = 0.05
"""Differences with a smaller p-value are reported as better or worse."""
FORMAT_NOTE = (
    "From the format: correct answers that the grading rule could not read, before minus after. They are read as the "
    "last number of the text, which may be correct by chance."
)

Bounds = Annotated[list[float], Field(min_length=2, max_length=2)]
"""Lower and upper bound of a 95% interval, as fractions."""
Counts = dict[str, tuple[int, int]]
"""(samples, passed) by task_id."""


class Schema(BaseModel):
    """Part of report.json: strict types, finite numbers, unknown keys ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)


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
    usual_answer: str | None = None
    """The answer of at least 90% of the samples of ten or more tasks, if there is one."""
    source: dict[str, Any]
    """Where the samples come from: the model, SHA-256 of its weights, adapter or samples file, engine, hardware."""


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


class ProblemChange(Schema):
    """A task that one model solves in at least half of its samples and the other does not."""

    problem_id: str = Field(validation_alias="task_id", serialization_alias="task_id")
    """Its key in report.json is `task_id`, as in results.jsonl and in HumanEval's harness."""
    before: list[int]
    """Number of passed samples and number of samples."""
    after: list[int]


class Part(Schema):
    """The gain or a part of it, as a fraction."""

    name: str
    value: float
    interval: Bounds


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
    [(answer, most)] = Counter(str(result.get("extracted") or "") for result in results).most_common(1)
    return Measurement(
        label=label,
        scores={name: metric.mean for name, metric in found.items()},
        intervals={name: list(metric.interval) for name, metric in found.items()},
        curve=curve,
        tasks=(tasks := len({result["task_id"] for result in results})),
        samples=len(results),
        sample_stats={kind: _counts(of_kind) for kind, of_kind in sorted(by_kind.items(), reverse=True)},
        usual_answer=answer if answer and most >= 0.9 * len(results) and tasks >= 10 else None,
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
    """Whether each value is the result of one sample, 0 or 1."""

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


def _main_counts(results: Sequence[Result]) -> Counts:
    """Return the counts of the samples, or of the greedy ones if there are no others."""
    return counts_by_task(results, greedy=False) or counts_by_task(results, greedy=True)


def _pass_rate(counts: Counts, k: int, seed: int) -> Metric:
    values, interval = pass_at_k.estimate_pass_at_k(list(counts.values()), k, seed)
    return Metric(values, interval, all(total == 1 for total, _ in counts.values()))


def _counts(results: Sequence[Result]) -> dict[str, float]:
    """Return the number of `samples` and how many pass each rule, have each status, are `unparsed` or `truncated`.

    If the task reads answers in several places, also how many pass by the place. Conversations also have counts of how
    they ended. `mean tokens`, `mean turns`, and so on are means.
    """
    rules = [rule for rule in RULES if rule in results[0]]
    counts: dict[str, float] = {f"{rule} rule": sum(each.get(rule) is True for each in results) for rule in rules}
    places = Counter(str(result["read_from"]) for result in results if result["passed"] and "read_from" in result)
    counts |= {f"passed, from a {place}": number for place, number in sorted(places.items())}
    counts |= sorted(Counter(str(result["status"]) for result in results).items())
    counts |= {"unparsed": sum(result["status"] in UNPARSED for result in results), "samples": len(results)}
    # Samples from other tools may use these keys with another meaning.
    lengths = [n for result in results if isinstance(n := result.get("num_tokens"), int) and 0 <= n < 2**32]
    if lengths:
        counts["truncated"] = sum(bool(result.get("truncated")) for result in results)
        counts["mean tokens"] = sum(lengths) / len(lengths)
    if all("messages" in result for result in results):
        for name in ("turns", "tool_calls", "failed_calls"):
            counts[f"mean {name.replace('_', ' ')}"] = statistics.fmean(result[name] for result in results)
        ends = Counter(str(result["ended_by"]) for result in results)
        counts |= {f"ended by {end}": number for end, number in sorted(ends.items())}
    return counts


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


def problem_changes(
    before: Sequence[Result], after: Sequence[Result]
) -> tuple[list[ProblemChange], list[ProblemChange]]:
    """Return the fixed and the regressed tasks, largest change first.

    A task is fixed if less than half of its samples passed before and at least half pass after. A regressed task is the
    opposite. Greedy samples are used only if there are no other samples.
    """
    second, changes = _main_counts(after), []
    for task, (total, passed) in _main_counts(before).items():
        total_after, passed_after = second[task]
        change = ProblemChange(problem_id=task, before=[passed, total], after=[passed_after, total_after])
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

    def rates(results: Sequence[Result]) -> NDArray[np.float64]:
        return np.array([passed / total for total, passed in _main_counts(results).values()])

    def in_any_format(results: Sequence[Result]) -> list[Result]:
        def is_hidden(result: Result) -> bool:  # it ended with the correct answer, which the rule could not read
            return result["status"] in UNPARSED and result.get("flexible") is True and not result.get("truncated")

        return [{**result, "passed": result["passed"] or is_hidden(result)} for result in results]

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
