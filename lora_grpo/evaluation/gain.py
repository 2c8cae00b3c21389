"""How much of a gain in pass@1 comes from the answer format, and why samples fail before and after training.

A trained model may pass more often because it is more often right, or only because it writes right answers in the
format that the grading rule reads. A sample is right in any format if it passes, or if it ended by itself without an
answer that the rule can read, and the `flexible` rule reads the right number. With the means over problems

    gain        = passed after - passed before
    other       = right in any format after - right in any format before
    from format = gain - other

Each part is a mean over problems, so its interval is the paired bootstrap of `pass_at_k.difference_interval`.

`flexible` reads the last number of a text, which may be right by chance. It therefore counts only for samples without
a readable answer: an answer that was read and is wrong, a hedge or a truncated text stays wrong. Programs, and task
files without a `flexible` rule, are graded in one way only, so their format is not separated.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from lora_grpo.evaluation import pass_at_k
from lora_grpo.evaluation.comparison import percent
from lora_grpo.evaluation.measurement import UNPARSED, Bounds, Schema
from lora_grpo.evaluation.results import Result, is_greedy

_ORDER = ("right", "right, but not in the format", "no readable answer", "truncated")
"""Reasons that come first in the table."""


class Part(Schema):
    """One part of the gain, as a fraction."""

    name: str
    value: float
    interval: Bounds


class Gain(Schema):
    """The gain in pass@1 and its parts."""

    parts: list[Part]
    """The gain, the part from the format, and the other part; empty if the format cannot be separated."""
    reasons: dict[str, list[int]]
    """Number of samples that ended for each reason, before and after. Each sample has one."""

    def tables(self, before: str, after: str) -> list[tuple[list[str], list[tuple[str, ...]]]]:
        """Return the parts in percentage points, if there are any, and the share of samples by reason."""
        totals = [sum(column) for column in zip(*self.reasons.values(), strict=True)]
        rows = [
            (name, *(f"{100 * count / total:.1f} ({count})" for count, total in zip(counts, totals, strict=True)))
            for name, counts in self.reasons.items()
        ]
        reasons = (["% of samples (number)", before, after], rows)
        parts: list[tuple[str, ...]] = [(part.name, percent(part.value, part.interval, "+")) for part in self.parts]
        return [(["", "points [95% interval]"], parts), reasons] if parts else [reasons]

    @property
    def note(self) -> str:
        """What the parts mean."""
        if not self.parts:
            return "The gain from the format is unknown: an answer of this task that cannot be read cannot be graded."
        return (
            "From the format: right answers that the grading rule could not read, before minus after. They are read as "
            "the last number of the text, which may be right by chance."
        )


def split_gain(before: Sequence[Result], after: Sequence[Result], seed: int) -> Gain:
    """Split the gain between the samples of two models on the same problems.

    Greedy samples count only if there are no others.
    """
    models = [_without_greedy(results) for results in (before, after)]

    passed = [_rates(results, lambda result: bool(result["passed"])) for results in models]
    right = [_rates(results, _is_right) for results in models]
    gains = [passed[1][name] - passed[0][name] for name in passed[0]]
    others = [right[1][name] - right[0][name] for name in right[0]]
    from_format = [gain - other for gain, other in zip(gains, others, strict=True)]
    parts = []
    if any("flexible" in result for result in before):
        named = {"gain in pass@1": gains, "from the format": from_format, "other": others}
        for name, changes in named.items():
            interval = pass_at_k.difference_interval([0.0] * len(changes), changes, seed=seed)
            parts.append(Part(name=name, value=statistics.fmean(changes), interval=list(interval)))
    first, second = (Counter(map(_reason, results)) for results in models)
    names = sorted(first | second, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    return Gain(parts=parts, reasons={name: [first[name], second[name]] for name in names})


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


def _reason(result: Result) -> str:
    if result["passed"]:
        return "right"
    if result.get("truncated"):
        return "truncated"
    if _is_right(result):
        return "right, but not in the format"
    status = str(result.get("status"))
    return "no readable answer" if status in UNPARSED else status.replace("_", " ")


def _without_greedy(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if not is_greedy(result)] or list(results)
