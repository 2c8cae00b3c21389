"""A few sampled groups, and what they come to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lora_grpo.evaluation import UNPARSED, Interval, bootstrap_interval, wilson_interval
from lora_grpo.tasks import Row, Verdict

_EQUAL = 1e-6
"""Rewards closer than this are one: sums of the same numbers differ by rounding."""


@dataclass(frozen=True)
class Answer:
    """One sampled completion and all that is said of it."""

    text: str
    num_tokens: int
    truncated: bool
    rewards: dict[str, float | None]
    """Each reward's value, before its scale; None where it could not grade."""
    verdict: Verdict | None
    """The grader's; None for a task without right answers."""

    @property
    def is_right(self) -> bool:
        return self.verdict is not None and self.verdict.passed

    @property
    def is_unparsed(self) -> bool:
        """Whether no answer could be read from it."""
        return self.verdict is not None and self.verdict.reason in UNPARSED


@dataclass(frozen=True)
class Group:
    """The completions of one prompt, which GRPO compares with each other."""

    row: Row
    weights: dict[str, float]
    """Each reward's scale."""
    answers: tuple[Answer, ...]

    def scaled(self, name: str, answer: Answer) -> float | None:
        """Return what a reward adds to a completion's sum; None where it could not grade."""
        value = answer.rewards[name]
        return None if value is None else self.weights[name] * value

    def part(self, name: str) -> list[float | None]:
        """Return what a reward adds to the sum of each completion."""
        return [self.scaled(name, answer) for answer in self.answers]

    @property
    def sums(self) -> list[float | None]:
        """What each completion earns; None where no reward could grade it."""
        parts = zip(*map(self.part, self.weights), strict=True)
        return [None if all(v is None for v in part) else sum(v or 0.0 for v in part) for part in parts]

    @property
    def solved(self) -> int:
        """Completions with the right answer."""
        return sum(answer.is_right for answer in self.answers)

    @property
    def is_mixed(self) -> bool:
        """Whether some of the completions are right and some are wrong."""
        return 0 < self.solved < len(self.answers)


@dataclass(frozen=True)
class Share:
    """A share with its 95 % interval; all are fractions."""

    value: float
    interval: Interval

    def __str__(self) -> str:
        return f"{100 * self.value:.0f} % [{100 * self.interval.low:.0f}, {100 * self.interval.high:.0f}]"


@dataclass(frozen=True)
class Summary:
    """What the groups come to."""

    groups: int
    completions: int
    rewards: dict[str, tuple[float, float] | None]
    """Mean and standard deviation of each reward, scaled, over all completions, and of their `sum`; None: ungraded."""
    varying: tuple[str, ...]
    """The rewards that differ within at least one group."""
    flat: Share
    """Groups whose completions all earn the same."""
    solved: Share | None
    """Completions; None for a task without right answers, as the next two."""
    difficulty: tuple[int, int, int] | None
    """Problems that all completions solve, some, and none."""
    unparsed: Share | None
    """Completions that ended and that no answer could be read from."""
    truncated: Share
    distinct: float
    """Different completions in a group, on average."""
    num_tokens: float
    """Of a completion, on average."""


def differs(values: Sequence[float | None]) -> bool:
    """Return whether graded values are not all the same."""
    graded = [value for value in values if value is not None]
    return bool(graded) and max(graded) - min(graded) > _EQUAL


def measure(groups: Sequence[Group]) -> Summary:
    """Return what groups of one size come to.

    Intervals are of problems like these: shares of completions resample whole groups, shares of groups are Wilson's.
    """
    names = list(groups[0].weights)
    answers = [answer for group in groups for answer in group.answers]
    flat = sum(not differs(group.sums) for group in groups)
    graded = answers[0].verdict is not None
    always, never = sum(group.solved == len(group.answers) for group in groups), sum(not g.solved for g in groups)
    return Summary(
        groups=len(groups),
        completions=len(answers),
        rewards={name: _moments([v for g in groups for v in g.part(name)]) for name in names}
        | {"sum": _moments([value for group in groups for value in group.sums])},
        varying=tuple(name for name in names if any(differs(group.part(name)) for group in groups)),
        flat=share_of(flat, len(groups)),
        solved=_share([[a.is_right for a in g.answers] for g in groups]) if graded else None,
        difficulty=(always, len(groups) - always - never, never) if graded else None,
        unparsed=_share([[a.is_unparsed and not a.truncated for a in g.answers] for g in groups]) if graded else None,
        truncated=_share([[a.truncated for a in g.answers] for g in groups]),
        distinct=statistics.mean(len({a.text for a in g.answers}) for g in groups),
        num_tokens=statistics.mean(a.num_tokens for a in answers),
    )


def _moments(values: Sequence[float | None]) -> tuple[float, float] | None:
    graded = [value for value in values if value is not None]
    return (statistics.mean(graded), statistics.pstdev(graded)) if graded else None


def share_of(count: int, total: int) -> Share:
    """Return a share of groups, with Wilson's interval."""
    return Share(count / max(1, total), wilson_interval(count, max(1, total)))


def _share(groups: Sequence[Sequence[bool]]) -> Share:
    values = [statistics.mean(map(float, group)) for group in groups]
    return Share(statistics.mean(values), bootstrap_interval(values))
