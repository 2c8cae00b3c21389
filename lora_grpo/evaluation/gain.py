"""What a gain in pass@1 is made of: answers that were only in the wrong format, sharpening, and the rest.

Problem i has n samples of the base and of the trained model. Let b_ij be 1 if base sample j passes, and a_ij 1 if it is
right in any format: it passes, or it ended by itself without an answer that the headline rule can read, and `flexible`
reads the right number. t_ij and u_ij are the same of the trained model. Then

    gain       = mean_ij t_ij - b_ij
    format     = mean_ij (a_ij - b_ij) - (u_ij - t_ij)   right answers that the format hid, before minus after
    sharpening = mean_ij s_ij (u_ij - a_ij)              s_ij: one of the other k = n - 1 base samples is right
    rest       = mean_ij (1 - s_ij) (u_ij - a_ij)        none of them is

and format + sharpening + rest = gain. A part of sharpening is what a majority vote would already have given: the same
sum with the share of votes of the other k samples that the right answer wins (1, or 1/m in a tie of m answers).

All parts are means over problems, so their intervals are the paired bootstrap of `pass_at_k.difference_interval`.
Sample j is left out of its own vote. Otherwise, problems where the base was lucky would count as solved with too high a
base rate, and sharpening would come out too small. Samples j of both models have the same seed, so that of the trained
model is as lucky as that of the base, and is left out of the vote with it. In expectation, sharpening is the gain on
each problem, weighted by the probability that k samples of the base contain the right answer. If the models have
different numbers of samples, as files may, u_ij is the mean over the samples of the trained model: unbiased if their
seeds differ.

Limits:

- k is small. A problem that the base solves in 1 of 10 samples is mostly counted in the rest, which is therefore an
  upper bound of what is new. More samples of the base move points from the rest to sharpening. `rest_by_k` shows
  whether the rest still falls; it has an unbiased estimate for each smaller k.
- `flexible` reads the last number of a text, which may be right by chance. It counts only for samples that ended by
  themselves without a readable answer: an answer that was read and is wrong, a hedge or a truncated text stays wrong.
- Training on the format can also move a model to a style of answer that is more often right. That is sharpening here,
  but a format-only control gains it too.
- Programs, and tasks from a file that returns no `flexible` rule, are graded in one way only: nothing tells whether an
  unreadable answer was right, so format is not separated, and answers cannot be compared for a vote.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation

import numpy as np

from lora_grpo.evaluation import pass_at_k
from lora_grpo.evaluation.comparison import percent
from lora_grpo.evaluation.measurement import UNPARSED, Bounds, CurvePoint, Schema
from lora_grpo.evaluation.results import GREEDY, Result

_LAST_NUMBER = re.compile(r"-?[0-9][0-9.,]*")
_RIGHT = "right"
"""The vote of every right answer. Other votes are numbers."""


class Part(Schema):
    """One part of the gain, as a fraction."""

    name: str
    value: float
    interval: Bounds


class Reason(Schema):
    """How many samples ended for one reason. Each sample has one."""

    name: str
    before: int
    after: int


class Gain(Schema):
    """The gain in pass@1 and its parts."""

    total: Part
    parts: list[Part]
    """They add up to the total."""
    majority: Part | None
    """The part of sharpening that a majority vote of the base would have given; None if answers cannot be compared."""
    rest_by_k: list[CurvePoint]
    """The rest for smaller numbers of base samples, up to k = `others`."""
    others: int
    """k: one less than the number of base samples of a problem, or than the fewest if problems differ."""
    has_format: bool
    """Whether right answers in another format can be told from wrong ones."""
    reasons: list[Reason]
    samples: list[int]
    """Number of samples before and after."""

    def parts_table(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return the gain and its parts in percentage points."""
        rows = [self.total, *self.parts]
        if self.majority:
            rows.insert(-1, self.majority)
        return ["", "points [95% interval]"], [(row.name, percent(row.value, row.interval, "+")) for row in rows]

    def reasons_table(self, before: str, after: str) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return the share of samples by reason, with one column per model."""
        rows = []
        for reason in self.reasons:
            counts = zip((reason.before, reason.after), self.samples, strict=True)
            rows.append((reason.name, *(f"{100 * count / total:.1f} ({count})" for count, total in counts)))
        return ["% of samples (number)", before, after], rows

    @property
    def notes(self) -> list[str]:
        """What the parts mean, and what they cannot tell."""
        notes = []
        if self.has_format:
            notes.append(
                "Format: right answers that the headline rule could not read, before minus after. They are read as the "
                "last number of the text, which may be right by chance."
            )
        else:
            notes.append("Format is not separated: an answer of this task that cannot be read cannot be graded.")
        if self.others:
            others = "1 other sample" if self.others == 1 else f"{self.others} other samples"
            notes.append(
                f"Sharpening: the gain on answers that the model already gave before training, in {others} of the "
                "problem. Rest: the gain where none of these is right. It is an upper bound of what is new. By number "
                "of other samples, the rest is "
                + ", ".join(f"{100 * point.value:+.1f} points with {point.k}" for point in self.rest_by_k)
                + "."
            )
        else:
            notes.append("Sharpening is not separated: that needs at least 2 samples of each problem.")
        return notes


def explain(before: Sequence[Result], after: Sequence[Result], seed: int) -> Gain:
    """Split the gain between the samples of two models on the same problems.

    Greedy samples count only if there are no others.
    """
    first, second = _by_problem(before), _by_problem(after)
    has_format = any("flexible" in result for result in before)
    others = min(map(len, first.values())) - 1
    problems = [_Problem(first[name], second[name]) for name in first]

    def part(name: str, values: Sequence[float]) -> Part:
        changes = np.array(values)
        interval = pass_at_k.difference_interval(np.zeros(changes.size), changes, seed=seed)
        return Part(name=name, value=float(changes.mean()), interval=list(interval))

    parts = [part("format", [each.format for each in problems])] if has_format else []
    if others:
        parts.append(part("sharpening", [each.in_any_format - each.rest(others) for each in problems]))
    parts.append(part("rest", [each.rest(others) for each in problems]))
    majority = None
    if others and has_format:
        majority = part(f"of which majority vote of {others}", [each.by_majority(others) for each in problems])
    rest_by_k = []
    for k in sorted({*(2**power for power in range(20)), others} - {0}):
        if k <= others:
            at_k = part("", [each.rest(k) for each in problems])
            rest_by_k.append(CurvePoint(k=k, value=at_k.value, interval=at_k.interval))
    reasons = [Counter(map(_reason, _sampled(results))) for results in (before, after)]
    names = sorted(reasons[0] | reasons[1], key=lambda name: (_ORDER.get(name, len(_ORDER)), name))
    return Gain(
        total=part("gain in pass@1", [each.gain for each in problems]),
        parts=parts,
        majority=majority,
        rest_by_k=rest_by_k,
        others=others,
        has_format=has_format,
        reasons=[Reason(name=name, before=reasons[0][name], after=reasons[1][name]) for name in names],
        samples=[reasons[0].total(), reasons[1].total()],
    )


class _Problem:
    """The parts of the gain on one problem; see the module for the symbols."""

    def __init__(self, before: Sequence[Result], after: Sequence[Result]) -> None:
        self.answers = [_vote(result) for result in before]
        self.votes = Counter(self.answers)
        self.samples = len(before)
        self.right_after = [float(_is_right(result)) for result in after]
        if len(after) != self.samples:
            self.right_after = [statistics.fmean(self.right_after)] * self.samples
        passed, passed_after = (statistics.fmean(result["passed"] for result in each) for each in (before, after))
        self.gain = passed_after - passed
        self.in_any_format = statistics.fmean(self.right_after) - self.votes[_RIGHT] / self.samples
        self.format = self.gain - self.in_any_format

    def rest(self, k: int) -> float:
        """Return the gain in right answers that none of k other base samples has."""
        wrong = self.samples - self.votes[_RIGHT]

        def none_right(wrong_others: int) -> float:
            return math.comb(wrong_others, k) / math.comb(self.samples - 1, k)

        rest = 0.0
        for answer, after in zip(self.answers, self.right_after, strict=True):
            is_right = answer == _RIGHT
            rest += none_right(wrong - (not is_right)) * (after - is_right)
        return rest / self.samples

    def by_majority(self, k: int) -> float:
        """Return the gain in right answers that a majority vote of k other base samples has."""
        gained, votes = 0.0, Counter(self.answers[: k + 1])
        for vote, after in zip(self.answers[: k + 1], self.right_after, strict=False):
            gained += _won(votes - Counter([vote])) * (after - (vote == _RIGHT))
        return gained / (k + 1)


def _won(votes: Mapping[str | None, int]) -> float:
    """Return the share of the vote that the right answer wins: 1, 1/m in a tie of m answers, or 0."""
    counts = [count for vote, count in votes.items() if vote is not None]
    right = votes.get(_RIGHT, 0)
    return 1 / counts.count(right) if right and right == max(counts) else 0.0


def _is_right(result: Result) -> bool:
    """Return whether a sample has the right answer in any format."""
    if result["passed"] or result.get("truncated"):
        return bool(result["passed"])
    return result.get("status") in UNPARSED and result.get("flexible") is True


def _vote(result: Result) -> str | None:
    """Return what a sample votes for; None if it has no answer or is truncated."""
    if _is_right(result):
        return _RIGHT
    answer = result.get("extracted")
    if not isinstance(answer, str):
        numbers = _LAST_NUMBER.findall(str(result["completion"]))
        if result.get("truncated") or not numbers:
            return None
        answer = numbers[-1]
    try:
        return str(Decimal(answer.replace(",", "").rstrip(".")).normalize())
    except InvalidOperation:
        return answer


_NO_FORMAT, _UNREAD, _TRUNCATED = "right, but not in the format", "no readable answer", "truncated"
_ORDER = {_RIGHT: 0, _NO_FORMAT: 1, _UNREAD: 2, _TRUNCATED: 3}
"""Reasons that come first in the table."""


def _reason(result: Result) -> str:
    if result["passed"]:
        return _RIGHT
    if result.get("truncated"):
        return _TRUNCATED
    if _is_right(result):
        return _NO_FORMAT
    status = str(result.get("status"))
    return _UNREAD if status in UNPARSED else status.replace("_", " ")


def _sampled(results: Sequence[Result]) -> list[Result]:
    sampled = [result for result in results if result.get("draw") != GREEDY]
    return sampled or list(results)


def _draw(result: Result) -> int:
    draw = result.get("draw")
    return draw if isinstance(draw, int) else 0


def _by_problem(results: Sequence[Result]) -> dict[str, list[Result]]:
    problems: dict[str, list[Result]] = {}
    for result in sorted(_sampled(results), key=lambda result: (str(result["task_id"]), _draw(result))):
        problems.setdefault(str(result["task_id"]), []).append(result)
    return problems
