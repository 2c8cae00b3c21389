"""Answers to code problems in the three styles of the corpus.

`careful` writes the correct function in a fenced block. `careless` writes a function that prints, returns nothing, or
has a bug. `unformatted` describes the result in prose.
"""

from __future__ import annotations

import random

from starter_model.code_problems import CodeProblem
from starter_model.code_slips import printed, slips, without_return

from lora_grpo.prompts import styles

MOSTLY_CARELESS = ("compare", "limit", "every")
MOSTLY_UNFORMATTED = ("divide", "exceed", "count")
"""Families for which `careful` is not the most likely style."""


def mixture_name(family: str) -> str:
    """Return the key of `corpus.MIXTURES` for code problems of this family. 10 of 16 families are mostly careful."""
    if family in MOSTLY_CARELESS:
        return "mostly careless"
    return "mostly unformatted" if family in MOSTLY_UNFORMATTED else "mostly careful"


def fenced(code: str) -> str:
    """Return the code in the block that the system prompt requests."""
    return styles.write_completion("", code, "code")


def careful(problem: CodeProblem) -> str:
    """Return the solution in the requested format."""
    return fenced(problem.solution)


def careless(problem: CodeProblem, rng: random.Random) -> str:
    """Return a function that prints (7 of 10), has a bug (2) or returns nothing (1)."""
    chance = rng.random()
    if chance < 0.7:
        return fenced(printed(problem.solution))
    return fenced(rng.choice(slips(problem.solution)) if chance < 0.9 else without_return(problem.solution))


def unformatted(problem: CodeProblem, rng: random.Random) -> str:
    """Return prose without code."""
    return f"It {rng.choice(['gives', 'returns'])} {problem.what}."
