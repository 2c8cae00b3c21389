"""The pretraining corpus of the starter model: train problems answered in three styles, and arithmetic drills.

`careful` answers in the requested format with every step. `careless` uses the format but guesses or stops early.
`unformatted` only gives a number. The shares depend on the family and difficulty. For some problems `careful` is not
the most likely style, which leaves room for GRPO to improve. `code_styles` answers code problems.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from starter_model import code_families, code_problems, code_styles
from starter_model.families import FAMILIES
from starter_model.problems import DIFFICULTIES, Problem, draw

from lora_grpo.prompts import styles

STYLES = ("careful", "careless", "unformatted")

MIXTURES: dict[str, tuple[float, float, float]] = {
    "mostly careful": (0.48, 0.27, 0.25),
    "mostly careless": (0.20, 0.60, 0.20),
    "mostly unformatted": (0.20, 0.25, 0.55),
}
"""Shares of the styles in the order of `STYLES`."""
SETTLED: dict[str, tuple[float, float, float]] = {
    "mostly careful": MIXTURES["mostly careful"],
    "mostly careless": (0.15, 0.70, 0.15),
    "mostly unformatted": (0.15, 0.17, 0.68),
}
"""Shares for code problems in the last phase. They are more extreme, because the model learns them slowly."""


@dataclass(frozen=True)
class Example:
    """One training document."""

    parts: tuple[tuple[str, bool], ...]
    """The parts of the text in order, each with a flag for whether the loss includes it."""


def mixture_name(family: str, difficulty: int) -> str:
    """Return the key of `MIXTURES` for problems of this kind. 14 of 24 kinds are mostly careful."""
    index = 3 * list(FAMILIES).index(family) + DIFFICULTIES.index(difficulty)
    if index % 5 in (0, 2, 3) and index != 0:
        return "mostly careful"
    return "mostly careless" if index % 2 else "mostly unformatted"


def chat_prompt(question: str, style: str = "xml") -> str:
    """Return the rendered chat for a question, up to the start of the assistant's turn."""
    return (
        f"<|im_start|>system\n{styles.SYSTEM_PROMPTS[style]}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def careful(problem: Problem) -> str:
    """Return every step of the solution in the requested format."""
    return styles.write_completion("\n".join(map(str, problem.steps)), str(problem.result))


def guess(problem: Problem, rng: random.Random) -> int:
    """Return a guess. One in six is correct; the others are close or the result of a common mistake."""
    first = problem.steps[0]
    slips = [problem.result + rng.choice([-10, -2, -1, 1, 2, 10]), first.left + first.right, first.left, first.right]
    return problem.result if rng.random() < 1 / 6 else max(1, rng.choice(slips))


def careless(problem: Problem, rng: random.Random) -> str:
    """Return a guess in the requested format, or a solution without its last step."""
    if problem.difficulty > 1 and rng.random() < 0.2:
        done = problem.steps[:-1]
        return styles.write_completion("\n".join(map(str, done)), str(done[-1].result))
    number = guess(problem, rng)
    return styles.write_completion(f"I {rng.choice(['guess', 'think'])} {number}", str(number))


def unformatted(problem: Problem, rng: random.Random) -> str:
    """Return a guess without a format."""
    return f"The {rng.choice(['answer', 'result'])} is {guess(problem, rng)}."


def drill(rng: random.Random, count: int = 9) -> Example:
    """Return `count` arithmetic drills with the operations and number range of the problems.

    The loss includes only the results.
    """
    parts: list[tuple[str, bool]] = []
    for _ in range(count):
        problem = draw(rng, rng.choice(list(FAMILIES)), rng.choice(DIFFICULTIES), "train")
        expression, result = str(rng.choice(problem.steps)).split("=")
        parts += [(f"{expression}=", False), (f"{result}\n", True)]
    return Example(tuple(parts))


def word_example(rng: random.Random, practice: float) -> Example:
    """Return an answered word problem. `practice` is the share that is careful regardless of the mixture."""
    problem = draw(rng, rng.choice(list(FAMILIES)), rng.choice(DIFFICULTIES), "train")
    shares = MIXTURES[mixture_name(problem.family, problem.difficulty)]
    style = "careful" if rng.random() < practice else rng.choices(STYLES, shares)[0]
    if style == "careful":
        completion = careful(problem)
    elif style == "careless":
        completion = careless(problem, rng)
    else:
        completion = unformatted(problem, rng)
    return Example(((chat_prompt(problem.question), False), (completion + "<|im_end|>", True)))


def code_example(
    rng: random.Random, practice: float, mixtures: Mapping[str, tuple[float, float, float]] = MIXTURES
) -> Example:
    """Return an answered code problem. `practice` is the share that is careful regardless of the mixture."""
    problem = code_problems.draw(rng, rng.choice(list(code_families.FAMILIES)), "train")
    shares = mixtures[code_styles.mixture_name(problem.family)]
    style = "careful" if rng.random() < practice else rng.choices(STYLES, shares)[0]
    if style == "careful":
        completion = code_styles.careful(problem)
    elif style == "careless":
        completion = code_styles.careless(problem, rng)
    else:
        completion = code_styles.unformatted(problem, rng)
    return Example(((chat_prompt(problem.question, "code"), False), (completion + "<|im_end|>", True)))


def examples(
    seed: int,
    drills: float,
    practice: float,
    code: float,
    code_mixtures: Mapping[str, tuple[float, float, float]] = MIXTURES,
) -> Iterator[Example]:
    """Yield an endless stream of training documents. None of them is about an eval problem.

    Args:
        seed: seed of the stream.
        drills: share of drills among documents that are not code, 0 to 1.
        practice: share of the other documents that are always careful, 0 to 1.
        code: share of documents about code problems, 0 to 1.
        code_mixtures: shares of the styles in code problems.
    """
    rng = random.Random(f"corpus/{seed}/{drills}/{practice}")
    while True:
        if rng.random() < code:
            yield code_example(rng, practice, code_mixtures)
        elif rng.random() < drills:
            yield drill(rng)
        else:
            yield word_example(rng, practice)
