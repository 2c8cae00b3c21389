"""Pools of generated problems, in which no question occurs twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class _Asked(Protocol):
    @property
    def question(self) -> str: ...


Problem = TypeVar("Problem", bound=_Asked)


def distinct(problems: Iterable[Problem], size: int) -> list[Problem]:
    """Return the first `size` problems whose questions differ; a longer pool starts with the shorter one."""
    found: dict[str, Problem] = {}
    for problem in problems:
        if len(found) == size:
            break
        found.setdefault(problem.question, problem)
    return list(found.values())
