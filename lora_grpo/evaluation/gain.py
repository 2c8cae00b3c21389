"""How much of a gain in pass@1 comes from the answer format.

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

import statistics
from collections.abc import Callable, Sequence

from lora_grpo.evaluation import pass_at_k
from lora_grpo.evaluation.comparison import percent
from lora_grpo.evaluation.measurement import UNPARSED, Bounds, Schema
from lora_grpo.evaluation.results import Result, is_greedy

FORMAT_NOTE = (
    "From the format: right answers that the grading rule could not read, before minus after. They are read as the "
    "last number of the text, which may be right by chance."
)


class Part(Schema):
    """The gain or a part of it, as a fraction."""

    name: str
    value: float
    interval: Bounds

    def cells(self) -> tuple[str, str]:
        """Return the row of a table: name, and percentage points."""
        return self.name, percent(self.value, self.interval, "+")


def split_gain(before: Sequence[Result], after: Sequence[Result], seed: int) -> list[Part]:
    """Return the gain between the samples of two models, the part from the format, and the other part.

    Greedy samples count only if there are no others. Empty if the format cannot be separated.
    """
    if not any("flexible" in result for result in before):
        return []
    models = [[result for result in results if not is_greedy(result)] or results for results in (before, after)]
    passed, passed_after = (_rates(results, lambda result: bool(result["passed"])) for results in models)
    right, right_after = (_rates(results, _is_right) for results in models)
    gains = [passed_after[name] - passed[name] for name in passed]
    others = [right_after[name] - right[name] for name in passed]
    from_format = [gain - other for gain, other in zip(gains, others, strict=True)]
    parts = []
    for name, changes in {"gain in pass@1": gains, "from the format": from_format, "other": others}.items():
        # Each part is a mean over problems, so the paired bootstrap of a difference applies to it too.
        interval = pass_at_k.difference_interval([0.0] * len(changes), changes, seed=seed)
        parts.append(Part(name=name, value=statistics.fmean(changes), interval=list(interval)))
    return parts


def _rates(results: Sequence[Result], counts: Callable[[Result], bool]) -> dict[str, float]:
    """Return the share of samples of each problem that count."""
    problems: dict[str, list[bool]] = {}
    for result in results:
        problems.setdefault(str(result["task_id"]), []).append(counts(result))
    return {name: statistics.fmean(problems[name]) for name in sorted(problems)}


def _is_right(result: Result) -> bool:
    """Return whether a sample has the right answer in any format."""
    if result["passed"] or result.get("truncated"):
        return bool(result["passed"])
    return result.get("status") in UNPARSED and result.get("flexible") is True
