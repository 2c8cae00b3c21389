"""Seeded grade-school word problems with worked solutions: 8 families, each with 1, 2, or 3 steps (the difficulty).

A hash of the family and the numbers determines the split of a problem. Names and objects are not included, so no eval
problem is a reworded train problem, for any number of problems and any seed.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from starter_model.families import FAMILIES
from starter_model.pools import distinct, split_of

DIFFICULTIES = (1, 2, 3)
MAX_NUMBER = 60
"""The largest number in any problem or solution."""

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


@dataclass(frozen=True)
class Step:
    """One line of a worked solution: `label left operation right = result`."""

    label: str
    left: int
    operation: str
    right: int

    @property
    def result(self) -> int:
        """The result of the step. Division is exact in every problem."""
        return OPERATIONS[self.operation](self.left, self.right)

    def __str__(self) -> str:
        return f"{self.label} {self.left}{self.operation}{self.right}={self.result}"


@dataclass(frozen=True)
class Problem:
    """One word problem with its worked solution."""

    family: str
    question: str
    steps: tuple[Step, ...]

    @property
    def difficulty(self) -> int:
        """Number of steps in the solution: 1, 2, or 3."""
        return len(self.steps)

    @property
    def result(self) -> int:
        """The final number."""
        return self.steps[-1].result

    @property
    def answer(self) -> str:
        """The worked solution, which ends with `#### N` as in GSM8K."""
        return "\n".join([*map(str, self.steps), f"#### {self.result}"])

    @property
    def split(self) -> str:
        """The split, "train" or "eval", which depends only on the family and the numbers."""
        numbers = " ".join(f"{step.left}{step.operation}{step.right}" for step in self.steps)
        return split_of(f"{self.family}: {numbers}")

    @property
    def is_plausible(self) -> bool:
        """Whether every number is in 1..MAX_NUMBER and every division is exact."""
        exact = all(step.left % step.right == 0 for step in self.steps if step.operation == "/")
        return exact and all(0 < n <= MAX_NUMBER for s in self.steps for n in (s.left, s.right, s.result))


def draw(rng: random.Random, family: str, difficulty: int, split: str) -> Problem:
    """Return one problem of a family, difficulty, and split.

    Args:
        rng: random number generator. Its state determines the problem.
        family: a key of `FAMILIES`.
        difficulty: number of steps, one of `DIFFICULTIES`.
        split: "train" or "eval".
    """
    while True:
        question, drafts = FAMILIES[family](rng, difficulty)
        steps: list[Step] = []
        for label, left, operation, right in drafts:
            steps.append(Step(label, steps[-1].result if left is None else left, operation, right))
        problem = Problem(family, question, tuple(steps))
        if problem.is_plausible and problem.split == split:
            return problem


def stream(split: str, seed: int) -> Iterator[Problem]:
    """Yield an endless, seeded stream of problems of a split, cycling through families and difficulties."""
    rng = random.Random(f"starter/{split}/{seed}")
    while True:
        for difficulty in DIFFICULTIES:
            for family in FAMILIES:
                yield draw(rng, family, difficulty, split)


def pool(split: str, size: int, seed: int = 0) -> list[Problem]:
    """Return `size` problems of a split with distinct questions. A longer pool starts with the shorter one."""
    return distinct(stream(split, seed), size)
