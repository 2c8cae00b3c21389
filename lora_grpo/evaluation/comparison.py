"""Compare two models on the same problems: paired tests of each metric, and the problems that changed.

Both models answer the same problems, so each test is paired: it looks at the change of each problem, after minus
before. With one sample per problem it is McNemar's exact test, otherwise a permutation test. Formulas and references
are in `pass_at_k`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import Field

from lora_grpo.evaluation import pass_at_k
from lora_grpo.evaluation.measurement import Metric, main_pass_counts, metrics
from lora_grpo.evaluation.results import Result
from lora_grpo.evaluation.schema import Bounds, Schema

SIGNIFICANT = 0.05
"""Differences with a smaller p-value are reported as better or worse."""


class Comparison(Schema):
    """One metric of two models. Rates are fractions."""

    metric: str
    """`pass@k`, `greedy` or `mean score`."""
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
    """`exact McNemar` or `paired permutation`."""
    detectable: float | None = None
    """The smallest change that this number of problems detects with 80% power; None if no change can be detected."""

    @property
    def is_significant(self) -> bool:
        return self.p_value < SIGNIFICANT

    @property
    def p_text(self) -> str:
        return p_text(self.p_value)

    @property
    def verdict(self) -> str:
        """One sentence that says whether the metric changed."""
        change = f"{100 * self.difference:+.1f} points (p {self.p_text}, {self.test})"
        if self.is_significant:
            direction = "better" if self.difference > 0 else "worse"
            return f"{self.metric}: {direction}, {change}"
        power = "too few tasks to detect any change"
        if self.detectable is not None:
            power = f"this many tasks detect a change of {100 * self.detectable:.1f} points with 80% power"
        return f"{self.metric}: no significant difference, {change}; {power}"


class ProblemChange(Schema):
    """A problem that one model solves in at least half of its samples and the other does not."""

    problem_id: str = Field(validation_alias="task_id", serialization_alias="task_id")
    """Its key in report.json is `task_id`, as in results.jsonl and in HumanEval's harness."""
    before: list[int]
    """Number of passed samples and number of samples."""
    after: list[int]


@dataclass(frozen=True)
class ProblemChanges:
    """The problems that changed between two models, largest change first."""

    fixed: list[ProblemChange]
    """Less than half of the samples passed before, at least half pass after."""
    regressed: list[ProblemChange]
    """The opposite."""


def compare(before: Sequence[Result], after: Sequence[Result], ks: Sequence[int], seed: int) -> list[Comparison]:
    """Compare the samples of two models on the same problems, metric by metric.

    Args:
        ks: the k of pass@k.
        seed: of the intervals and of the permutation test.
    """
    metrics_before = metrics(before, ks, seed)
    metrics_after = metrics(after, ks, seed)
    table = []
    for name, metric_before in metrics_before.items():
        if name in metrics_after:
            table.append(_compare_metric(name, metric_before, metrics_after[name], seed))
    return table


def _compare_metric(name: str, before: Metric, after: Metric, seed: int) -> Comparison:
    if before.is_one_sample and after.is_one_sample:
        test = "exact McNemar"
        p_value = pass_at_k.mcnemar_exact(before.values, after.values)
    else:
        test = "paired permutation"
        p_value = pass_at_k.paired_permutation(before.values, after.values, seed=seed)
    return Comparison(
        metric=name,
        before=before.mean,
        before_interval=list(before.interval),
        after=after.mean,
        after_interval=list(after.interval),
        difference=float((after.values - before.values).mean()),
        difference_interval=list(pass_at_k.difference_interval(before.values, after.values, seed=seed)),
        p_value=p_value,
        test=test,
        detectable=pass_at_k.minimum_detectable_change(before.values, after.values),
    )


def problem_changes(before: Iterable[Result], after: Iterable[Result]) -> ProblemChanges:
    """Return the problems that are solved by one of two models only. Greedy samples count only if there are no others.

    A problem is solved if at least half of its samples pass.
    """
    counts_before = main_pass_counts(list(before))
    counts_after = main_pass_counts(list(after))

    def size_of_change(problem: str) -> float:
        return abs(counts_after[problem].rate - counts_before[problem].rate)

    changes = ProblemChanges(fixed=[], regressed=[])
    for problem in sorted(counts_before, key=size_of_change, reverse=True):
        old = counts_before[problem]
        new = counts_after[problem]
        change = ProblemChange(problem_id=problem, before=[old.passed, old.samples], after=[new.passed, new.samples])
        if old.rate < 0.5 <= new.rate:
            changes.fixed.append(change)
        elif new.rate < 0.5 <= old.rate:
            changes.regressed.append(change)
    return changes


def p_text(p_value: float) -> str:
    """Format a p-value with three digits."""
    return "<0.001" if p_value < 0.001 else f"{p_value:.3f}"
