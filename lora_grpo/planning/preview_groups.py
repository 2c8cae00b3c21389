"""Sampled groups, and their summary with 95% intervals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_grpo.evaluation import UNPARSED, bootstrap_interval, wilson_interval
from lora_grpo.tasks import Row, Verdict

_EQUAL = 1e-6
"""Rewards that differ by less than this are equal, because sums of the same numbers can differ by rounding."""


@dataclass(frozen=True)
class Answer:
    """One sampled completion with its rewards."""

    text: str
    num_tokens: int
    truncated: bool
    rewards: dict[str, float | None]
    """Each reward times its weight; None if the reward could not grade the completion."""
    verdict: Verdict

    @property
    def total(self) -> float | None:
        """The sum of the rewards; None if no reward could grade the completion."""
        graded = [value for value in self.rewards.values() if value is not None]
        return sum(graded) if graded else None


@dataclass(frozen=True)
class Group:
    """The completions of one prompt. GRPO compares their rewards with each other."""

    row: Row
    answers: tuple[Answer, ...]

    @property
    def solved(self) -> int:
        return sum(answer.verdict.passed for answer in self.answers)

    @property
    def is_mixed(self) -> bool:
        """Whether some completions are correct and others are not."""
        return 0 < self.solved < len(self.answers)

    def values(self, reward: str) -> list[float]:
        """Return the values of a reward, or of the `sum` of the rewards, without those that could not be graded."""
        values = [answer.total if reward == "sum" else answer.rewards[reward] for answer in self.answers]
        return [value for value in values if value is not None]

    def differs_in(self, reward: str) -> bool:
        """Whether the completions have different values of a reward, or of the `sum` of the rewards."""
        values = self.values(reward)
        return bool(values) and max(values) - min(values) > _EQUAL


@dataclass(frozen=True)
class Share:
    """A share with its 95% interval, as fractions."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.0f}% [{100 * self.low:.0f}, {100 * self.high:.0f}]"


@dataclass(frozen=True)
class Summary:
    groups: int
    size: int
    """Number of completions in a group."""
    rewards: dict[str, tuple[float, float] | None]
    """Mean and standard deviation of each weighted reward and of their `sum`; None if no completion was graded."""
    varying: tuple[str, ...]
    """Rewards that differ within at least one group."""
    flat: Share
    """Share of groups whose completions all have the same total reward."""
    solved: Share
    """Share of correct completions."""
    difficulty: tuple[int, int, int]
    """Number of problems solved by all, some and none of their completions."""
    partial_credit: bool
    """Whether the task gives scores between 0 and 1."""
    unparsed: Share
    """Share of completions that ended without a parsable answer."""
    truncated: Share
    distinct: float
    """Mean number of distinct completions in a group."""
    num_tokens: float
    """Mean length of a completion."""


def measure(groups: Sequence[Group]) -> Summary:
    """Return the summary of groups of equal size.

    Shares of completions have intervals that are bootstrapped over groups, because the completions of one prompt are
    alike; shares of groups have Wilson intervals.
    """
    answers = [answer for group in groups for answer in group.answers]
    names = list(answers[0].rewards)
    always, mixed = sum(group.solved == len(group.answers) for group in groups), sum(g.is_mixed for g in groups)
    values = {name: [value for group in groups for value in group.values(name)] for name in (*names, "sum")}

    def share(holds: Callable[[Answer], bool]) -> Share:
        rates = [statistics.mean(float(holds(answer)) for answer in group.answers) for group in groups]
        return Share(statistics.mean(rates), *bootstrap_interval(rates))

    return Summary(
        groups=len(groups),
        size=len(groups[0].answers),
        rewards={name: (statistics.mean(v), statistics.pstdev(v)) if v else None for name, v in values.items()},
        varying=tuple(name for name in names if any(group.differs_in(name) for group in groups)),
        flat=share_of(sum(not group.differs_in("sum") for group in groups), len(groups)),
        solved=share(lambda answer: answer.verdict.passed),
        difficulty=(always, mixed, len(groups) - always - mixed),
        partial_credit=any(0 < answer.verdict.value < 1 for answer in answers),
        unparsed=share(lambda answer: answer.verdict.reason in UNPARSED and not answer.truncated),
        truncated=share(lambda answer: answer.truncated),
        distinct=statistics.mean(len({answer.text for answer in group.answers}) for group in groups),
        num_tokens=statistics.mean(answer.num_tokens for answer in answers),
    )


def share_of(count: int, total: int) -> Share:
    """Return the share of groups with its interval."""
    return Share(count / max(1, total), *wilson_interval(count, max(1, total)))
