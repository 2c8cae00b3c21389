"""Seeded problems about tiny Python functions, each with its solution and unit tests.

A hash of the family and the body determines the split of a problem. The names are not included, so no eval problem is a
reworded train problem, for any number of problems and any seed.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from starter_model.code_families import FAMILIES, Draft
from starter_model.pools import distinct, split_of

RANDOM_CASES = 4
"""Unit tests with seeded arguments, in addition to the edge cases."""

NUMBERS, PAIRS, LISTS, TEXTS = (
    ("x", "n", "k", "num"),
    ("x, y", "a, b", "p, q"),
    ("items", "values", "nums"),
    ("s", "text"),
)
NAMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "number": (("adjust", "compute", "convert", "f", "scale", "score", "step"), NUMBERS),
    "truth": (("check", "f", "fits", "holds", "matches", "valid"), NUMBERS),
    "two numbers": (("combine", "compute", "f", "merge", "mix", "score"), PAIRS),
    "list": (("build", "convert", "f", "pick", "select", "update"), LISTS),
    "measure": (("compute", "f", "measure", "score", "rate"), LISTS),
    "text": (("build", "f", "label", "mark", "write"), TEXTS),
}
"""Names of functions and parameters, by kind of function."""


@dataclass(frozen=True)
class CodeProblem:
    """A function to write, with its solution."""

    family: str
    function: str
    """The name of the function."""
    parameters: str
    """The parameters, as written between the parentheses."""
    draft: Draft

    def named(self, text: str) -> str:
        """Return the text with the parameter names filled in."""
        first, *others = self.parameters.split(", ")
        return text.format(x=first, y="".join(others))

    @property
    def what(self) -> str:
        """A description of the function's result."""
        return self.named(self.draft.what)

    @property
    def question(self) -> str:
        """The task in words."""
        return f"Write a Python function `{self.function}({self.parameters})` that returns {self.what}."

    @property
    def solution(self) -> str:
        """The function's source, without a trailing newline."""
        return f"def {self.function}({self.parameters}):\n" + textwrap.indent(self.named(self.draft.body), "    ")

    @property
    def key(self) -> str:
        """The identity of the problem: its family and its computation."""
        return f"{self.family}: {self.draft.body}"

    @property
    def split(self) -> str:
        """The split, "train" or "eval", determined by the key."""
        return split_of(self.key)

    @property
    def tests(self) -> str:
        """Unit tests, one `assert` per line: edge cases, then random arguments seeded with the key."""
        scope: dict[str, object] = {}
        exec(self.solution, scope)
        function = scope[self.function]
        assert callable(function)
        rng = random.Random(self.key)
        cases = [*self.draft.edges, *(_arguments(rng, self.draft.kind) for _ in range(RANDOM_CASES))]
        calls = {", ".join(map(repr, case)): case for case in cases}
        return "\n".join(f"assert {self.function}({call}) == {function(*case)!r}" for call, case in calls.items())


def _arguments(rng: random.Random, kind: str) -> tuple[object, ...]:
    if kind == "text":
        return ("".join(rng.choices("abcdeXYZ ", k=rng.randint(2, 6))),)
    if kind in ("list", "measure"):
        return ([rng.randint(-9, 60) for _ in range(rng.randint(2, 6))],)
    return tuple(rng.randint(-30, 90) for _ in range(2 if kind == "two numbers" else 1))


def draw(rng: random.Random, family: str, split: str) -> CodeProblem:
    """Return one problem of a family and split.

    Args:
        rng: random number generator. Its state determines the problem.
        family: a key of `code_families.FAMILIES`.
        split: "train" or "eval".
    """
    while True:
        draft = FAMILIES[family](rng)
        functions, parameters = NAMES[draft.kind]
        problem = CodeProblem(family, rng.choice(functions), rng.choice(parameters), draft)
        if problem.split == split:
            return problem


def stream(split: str, seed: int) -> Iterator[CodeProblem]:
    """Yield an endless, seeded stream of problems of a split, cycling through the families."""
    rng = random.Random(f"starter-code/{split}/{seed}")
    while True:
        for family in FAMILIES:
            yield draw(rng, family, split)


def pool(split: str, size: int, seed: int = 0) -> list[CodeProblem]:
    """Return `size` problems of a split with distinct questions. A longer pool starts with the shorter one."""
    return distinct(stream(split, seed), size)
