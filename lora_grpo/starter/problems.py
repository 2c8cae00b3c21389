"""Seeded grade-school word problems with worked solutions: 8 families, each with 1, 2 or 3 steps (its difficulty).

A problem belongs to a split by a hash of its family, difficulty and numbers, whatever its names and objects are.
So no eval problem is a train problem in other words, however many are drawn and with whatever seed.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NAMES = ("Ann", "Ben", "Eva", "Kim", "Leo", "Lena", "Mia", "Omar", "Ravi", "Sam", "Tom", "Zoe")
OBJECTS = ("apples", "balls", "books", "cards", "cups", "pens", "plums", "shells", "stamps", "toys")
PARTS = (("half", 2), ("a third", 3), ("a quarter", 4), ("50%", 2), ("25%", 4), ("20%", 5), ("10%", 10))
DIFFICULTIES = (1, 2, 3)
MAX_NUMBER = 150
"""No number that occurs in a problem or in its solution is larger."""
EVAL_PERCENT = 20
"""Share of all problems, in percent, whose hash puts them in the eval split."""

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
        """What the step computes; division is exact in every problem."""
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
        """How many steps the solution takes: 1, 2 or 3."""
        return len(self.steps)

    @property
    def result(self) -> int:
        """The number asked for."""
        return self.steps[-1].result

    @property
    def answer(self) -> str:
        """The worked solution, ending in `#### N` as GSM8K's do."""
        return "\n".join([*map(str, self.steps), f"#### {self.result}"])

    @property
    def split(self) -> str:
        """ "train" or "eval", decided by family and numbers alone."""
        numbers = " ".join(f"{step.left}{step.operation}{step.right}" for step in self.steps)
        digest = hashlib.sha256(f"{self.family}: {numbers}".encode()).digest()
        return "eval" if int.from_bytes(digest[:4], "big") % 100 < EVAL_PERCENT else "train"

    @property
    def is_plausible(self) -> bool:
        """Whether every number lies in 1..MAX_NUMBER and every division is exact."""
        exact = all(step.left % step.right == 0 for step in self.steps if step.operation == "/")
        return exact and all(0 < n <= MAX_NUMBER for s in self.steps for n in (s.left, s.right, s.result))


Draft = tuple[str, list[tuple[str, int | None, str, int]]]
"""A question, and its steps as (label, left, operation, right), where a left of None is the previous step's result."""


def _buy(r: random.Random, difficulty: int) -> Draft:
    name, (thing, other) = r.choice(NAMES), r.sample(OBJECTS, 2)
    a, p, b, q = r.randint(2, 9), r.randint(2, 12), r.randint(2, 9), r.randint(2, 9)
    ask = f"How much does {name} pay?"
    if difficulty == 1:
        return f"{name} buys {a} {thing} at ${p} each. {ask}", [("Cost", a, "*", p)]
    if difficulty == 2:
        q += r.randint(0, 30)
        return f"{name} buys {a} {thing} at ${p} each and a bag for ${q}. {ask}", [
            ("Cost", a, "*", p),
            ("Total", None, "+", q),
        ]
    return f"{name} buys {a} {thing} at ${p} each and {b} {other} at ${q} each. {ask}", [
        ("Cost", a, "*", p),
        ("Cost", b, "*", q),
        ("Total", a * p, "+", b * q),
    ]


def _change(r: random.Random, difficulty: int) -> Draft:
    name, thing = r.choice(NAMES), r.choice(OBJECTS)
    money, a, p, q = r.randint(10, 99), r.randint(2, 9), r.randint(2, 9), r.randint(2, 20)
    ask = "How much money is left?"
    if difficulty == 1:
        spent = r.randint(3, 90)
        return f"{name} has ${money} and spends ${spent}. {ask}", [("Left", money, "-", spent)]
    if difficulty == 2:
        return f"{name} has ${money} and buys {a} {thing} at ${p} each. {ask}", [
            ("Cost", a, "*", p),
            ("Left", money, "-", a * p),
        ]
    return f"{name} has ${money} and buys {a} {thing} at ${p} each and a bag for ${q}. {ask}", [
        ("Cost", a, "*", p),
        ("Total", None, "+", q),
        ("Left", money, "-", a * p + q),
    ]


def _share(r: random.Random, difficulty: int) -> Draft:
    name, thing, friends, each = r.choice(NAMES), r.choice(OBJECTS), r.randint(2, 9), r.randint(2, 12)
    ask = f"equally among {friends} friends. How many {thing} does each get?"
    if difficulty == 1:
        return f"{name} shares {friends * each} {thing} {ask}", [("Each", friends * each, "/", friends)]
    if difficulty == 2:
        kept = r.randint(2, 20)
        total = friends * each + kept
        return f"{name} has {total} {thing}, keeps {kept} and shares the rest {ask}", [
            ("Left", total, "-", kept),
            ("Each", None, "/", friends),
        ]
    bags, size = r.randint(2, 9), r.randint(3, 12)
    kept = bags * size - friends * each
    return f"{name} has {bags} bags of {size} {thing}, keeps {kept} and shares the rest {ask}", [
        ("Total", bags, "*", size),
        ("Left", None, "-", kept),
        ("Each", None, "/", friends),
    ]


def _rate(r: random.Random, difficulty: int) -> Draft:
    thing, rate, hours, bad = r.choice(OBJECTS), r.randint(2, 12), r.randint(2, 9), r.randint(2, 20)
    if difficulty == 1:
        return f"A machine makes {rate} {thing} an hour. How many {thing} does it make in {hours} hours?", [
            ("Made", rate, "*", hours)
        ]
    if difficulty == 2:
        return (
            f"A machine makes {rate} {thing} an hour for {hours} hours. Then {bad} are lost. How many are left?",
            [("Made", rate, "*", hours), ("Left", None, "-", bad)],
        )
    rate = r.randint(2, 6)
    second = r.randint(2, 6)
    return (
        f"One machine makes {rate} {thing} an hour, another makes {second}. They run {hours} hours and lose {bad}."
        f" How many {thing} are left?",
        [("Rate", rate, "+", second), ("Made", None, "*", hours), ("Left", None, "-", bad)],
    )


def _compare(r: random.Random, difficulty: int) -> Draft:
    (first, second, third), thing = r.sample(NAMES, 3), r.choice(OBJECTS)
    count, gap, times = r.randint(5, 70), r.randint(2, 40), r.randint(2, 5)
    more, sign = r.choice([("more", "+"), ("fewer", "-")])
    start = f"{first} has {count} {thing}. {second} has {gap} {more} than {first}."
    if difficulty == 1:
        return f"{start} How many {thing} does {second} have?", [(second, count, sign, gap)]
    if difficulty == 2:
        return f"{start} How many {thing} do they have together?", [
            (second, count, sign, gap),
            ("Total", None, "+", count),
        ]
    count, gap = r.randint(2, 20), r.randint(2, 30)
    return (
        f"{first} has {count} {thing}. {second} has {times} times as many. {third} has {gap} {more} than {second}."
        f" How many {thing} do {first} and {third} have together?",
        [(second, count, "*", times), (third, None, sign, gap), ("Total", None, "+", count)],
    )


def _boxes(r: random.Random, difficulty: int) -> Draft:
    thing, boxes, size = r.choice(OBJECTS), r.randint(2, 9), r.randint(2, 12)
    name, gone, loose = r.choice(NAMES), r.randint(2, 30), r.randint(2, 30)
    start = f"There are {boxes} boxes with {size} {thing} each"
    if difficulty == 1:
        return f"{start}. How many {thing} are there?", [("Total", boxes, "*", size)]
    if difficulty == 2:
        return f"{start}. {name} takes {gone} {thing}. How many {thing} are left?", [
            ("Total", boxes, "*", size),
            ("Left", None, "-", gone),
        ]
    return f"{start} and {loose} more {thing}. {name} takes {gone} {thing}. How many {thing} are left?", [
        ("Total", boxes, "*", size),
        ("Total", None, "+", loose),
        ("Left", None, "-", gone),
    ]


def _part(r: random.Random, difficulty: int) -> Draft:
    name, thing, (part, divisor) = r.choice(NAMES), r.choice(OBJECTS), r.choice(PARTS)
    total = divisor * r.randint(2, 14)
    if difficulty == 1:
        return f"{name} has {total} {thing} and gives away {part}. How many {thing} does {name} give away?", [
            ("Away", total, "/", divisor)
        ]
    if difficulty == 2:
        return f"{name} has {total} {thing} and gives away {part}. How many {thing} are left?", [
            ("Away", total, "/", divisor),
            ("Left", total, "-", total // divisor),
        ]
    gained = r.randint(2, max(2, total - 2))
    start = f"{name} has {total - gained} {thing}, gets {gained} more and gives away {part}."
    return f"{start} How many {thing} are left?", [
        ("Total", total - gained, "+", gained),
        ("Away", None, "/", divisor),
        ("Left", total, "-", total // divisor),
    ]


def _save(r: random.Random, difficulty: int) -> Draft:
    name, weekly, weeks, start = r.choice(NAMES), r.randint(2, 12), r.randint(2, 9), r.randint(2, 50)
    if difficulty == 1:
        return f"{name} saves ${weekly} a week. How many weeks does it take to save ${weekly * weeks}?", [
            ("Weeks", weekly * weeks, "/", weekly)
        ]
    ask = f"How much money does {name} have after {weeks} weeks?"
    if difficulty == 2:
        return f"{name} has ${start} and saves ${weekly} a week. {ask}", [
            ("Saved", weekly, "*", weeks),
            ("Total", None, "+", start),
        ]
    spent = r.randint(2, 30)
    return f"{name} has ${start}, earns ${weekly + spent} a week and spends ${spent} a week. {ask}", [
        ("Rate", weekly + spent, "-", spent),
        ("Saved", None, "*", weeks),
        ("Total", None, "+", start),
    ]


FAMILIES: dict[str, Callable[[random.Random, int], Draft]] = {
    "buy": _buy,
    "change": _change,
    "share": _share,
    "rate": _rate,
    "compare": _compare,
    "boxes": _boxes,
    "part": _part,
    "save": _save,
}


def draw(rng: random.Random, family: str, difficulty: int, split: str) -> Problem:
    """Return one problem of the family, difficulty and split asked for.

    Args:
        rng: source of randomness; its state decides the problem.
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
    """Yield problems of `split` without end, families and difficulties in turn; the same for the same seed."""
    rng = random.Random(f"starter/{split}/{seed}")
    while True:
        for difficulty in DIFFICULTIES:
            for family in FAMILIES:
                yield draw(rng, family, difficulty, split)


def pool(split: str, size: int, seed: int = 0) -> list[Problem]:
    """Return `size` problems of `split`, no question twice; a longer pool starts with the shorter one."""
    problems: dict[str, Problem] = {}
    for problem in stream(split, seed):
        if len(problems) == size:
            break
        problems.setdefault(problem.question, problem)
    return list(problems.values())
