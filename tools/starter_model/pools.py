"""Splits of generated problems and pools of distinct problems."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol, TypeVar

EVAL_PERCENT = 20
"""Percentage of all problems that belong to the eval split."""


class _HasQuestion(Protocol):
    @property
    def question(self) -> str: ...


Problem = TypeVar("Problem", bound=_HasQuestion)


def split_of(key: str) -> str:
    """Return the split of a problem, "train" or "eval", from a hash of its key."""
    digest = hashlib.sha256(key.encode()).digest()
    return "eval" if int.from_bytes(digest[:4], "big") % 100 < EVAL_PERCENT else "train"


def distinct(problems: Iterable[Problem], size: int) -> list[Problem]:
    """Return the first `size` problems with distinct questions. A longer pool starts with the shorter one."""
    pool: dict[str, Problem] = {}
    for problem in problems:
        if len(pool) == size:
            break
        pool.setdefault(problem.question, problem)
    return list(pool.values())
