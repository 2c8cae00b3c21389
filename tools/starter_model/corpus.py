"""What the starter model was pretrained on: train problems answered in three manners, and bare arithmetic.

Word problems are answered here; how code problems are answered is in `code_manners`.

The manners are what GRPO has to select from. `careful` answers in the asked format with every step worked out;
`careless` uses the format but guesses or stops early; `unformatted` just says a number. How often each occurs
depends on the problem's family and difficulty, so the model's likeliest manner is careful for some and not for others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from starter_model import code_styles

from lora_grpo.starter import code_families, code_problems
from lora_grpo.starter.families import FAMILIES
from lora_grpo.starter.problems import DIFFICULTIES, Problem, draw
from lora_grpo.tasks import chat

MANNERS = ("careful", "careless", "unformatted")

MIXTURES: dict[str, tuple[float, float, float]] = {
    "mostly careful": (0.48, 0.27, 0.25),
    "mostly careless": (0.20, 0.60, 0.20),
    "mostly unformatted": (0.20, 0.25, 0.55),
}
"""Shares of the manners, in the order of `MANNERS`."""
SETTLED: dict[str, tuple[float, float, float]] = {
    "mostly careful": MIXTURES["mostly careful"],
    "mostly careless": (0.15, 0.70, 0.15),
    "mostly unformatted": (0.15, 0.17, 0.68),
}
"""The shares for code problems while the model settles: family by family they are learnt slowly, so clearer ones."""


@dataclass(frozen=True)
class Example:
    """One document."""

    parts: tuple[tuple[str, bool], ...]
    """Its text in order, each part with whether the loss is taken on it."""


def mixture_name(family: str, difficulty: int) -> str:
    """Return the key of `MIXTURES` for problems of this kind: 14 of 24 kinds are mostly careful."""
    index = 3 * list(FAMILIES).index(family) + DIFFICULTIES.index(difficulty)
    if index % 5 in (0, 2, 3) and index != 0:
        return "mostly careful"
    return "mostly careless" if index % 2 else "mostly unformatted"


def chat_prompt(question: str, style: str = "xml") -> str:
    """Return the text that the chat template renders for the question, up to where the assistant starts."""
    return (
        f"<|im_start|>system\n{chat.SYSTEM_PROMPTS[style]}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def careful(problem: Problem) -> str:
    """Return the asked format with every step of the solution."""
    return chat.write_completion("\n".join(map(str, problem.steps)), str(problem.result))


def guess(problem: Problem, rng: random.Random) -> int:
    """Return a number someone might say without working it out: right one time in six, else near or from a slip."""
    first = problem.steps[0]
    slips = [problem.result + rng.choice([-10, -2, -1, 1, 2, 10]), first.left + first.right, first.left, first.right]
    return problem.result if rng.random() < 1 / 6 else max(1, rng.choice(slips))


def careless(problem: Problem, rng: random.Random) -> str:
    """Return the asked format with a guess, or with the solution broken off before its last step."""
    if problem.difficulty > 1 and rng.random() < 0.2:
        done = problem.steps[:-1]
        return chat.write_completion("\n".join(map(str, done)), str(done[-1].result))
    number = guess(problem, rng)
    return chat.write_completion(f"I {rng.choice(['guess', 'think'])} {number}", str(number))


def unformatted(problem: Problem, rng: random.Random) -> str:
    """Return a number outside any format, as a guess."""
    return f"The {rng.choice(['answer', 'result'])} is {guess(problem, rng)}."


def drill(rng: random.Random, count: int = 9) -> Example:
    """Return `count` bare sums, in the operations and sizes that the problems use; only their results are learnt."""
    parts: list[tuple[str, bool]] = []
    for _ in range(count):
        problem = draw(rng, rng.choice(list(FAMILIES)), rng.choice(DIFFICULTIES), "train")
        expression, result = str(rng.choice(problem.steps)).split("=")
        parts += [(f"{expression}=", False), (f"{result}\n", True)]
    return Example(tuple(parts))


def word_example(rng: random.Random, practice: float) -> Example:
    """Return a word problem answered in some manner; `practice` is the share of careful-whatever-the-mixture."""
    problem = draw(rng, rng.choice(list(FAMILIES)), rng.choice(DIFFICULTIES), "train")
    shares = MIXTURES[mixture_name(problem.family, problem.difficulty)]
    manner = "careful" if rng.random() < practice else rng.choices(MANNERS, shares)[0]
    if manner == "careful":
        completion = careful(problem)
    elif manner == "careless":
        completion = careless(problem, rng)
    else:
        completion = unformatted(problem, rng)
    return Example(((chat_prompt(problem.question), False), (completion + "<|im_end|>", True)))


def code_example(
    rng: random.Random, practice: float, mixtures: Mapping[str, tuple[float, float, float]] = MIXTURES
) -> Example:
    """Return a code problem answered in some manner; `practice` is the share of careful-whatever-the-mixture."""
    problem = code_problems.draw(rng, rng.choice(list(code_families.FAMILIES)), "train")
    shares = mixtures[code_styles.mixture_name(problem.family)]
    manner = "careful" if rng.random() < practice else rng.choices(MANNERS, shares)[0]
    if manner == "careful":
        completion = code_styles.careful(problem)
    elif manner == "careless":
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
    """Yield training documents without end; none is about an eval problem.

    Args:
        seed: seed of the whole stream.
        drills: share of the documents that are not code which are drills, 0..1.
        practice: share of the other documents that are careful whatever the mixture says, 0..1.
        code: share of documents about code problems, 0..1.
        code_mixtures: their shares of the manners.
    """
    rng = random.Random(f"corpus/{seed}/{drills}/{practice}")
    while True:
        if rng.random() < code:
            yield code_example(rng, practice, code_mixtures)
        elif rng.random() < drills:
            yield drill(rng)
        else:
            yield word_example(rng, practice)
