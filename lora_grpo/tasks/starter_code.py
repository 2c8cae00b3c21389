"""The starter code task: generated problems about tiny Python functions, graded by their unit tests."""

from __future__ import annotations

import random

from lora_grpo.errors import UserError
from lora_grpo.starter.code_problems import pool
from lora_grpo.tasks import Row
from lora_grpo.tasks.code_grading import gold_completion, grade, grade_many

__all__ = ["gold_completion", "grade", "grade_many", "load"]

POOL_SIZES = {"train": 4000, "eval": 1000}


def load(split: str, source: str | None = None, limit: int | None = None, seed: int = 0) -> list[Row]:
    """Return the rows of `split`; the pools are fixed, so that an id names the same problem for every seed.

    Args:
        split: "train" or "eval"; no problem is in both (see `lora_grpo.starter.code_problems`).
        source: must be None: the problems are generated.
        limit: keep this many rows, drawn with `seed` without replacement and kept in order; None keeps all.
        seed: seed of that draw.

    Raises:
        UserError: a source is given, the split is unknown, or the limit is less than 1.
    """
    if source is not None:
        raise UserError(f"the starter-code task generates its problems, got source {source!r}; leave the source out")
    if split not in POOL_SIZES:
        raise UserError(f"unknown split {split!r} of the starter-code task; expected one of {', '.join(POOL_SIZES)}")
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit}; expected at least 1 row, or no limit")
    size = POOL_SIZES[split]
    kept = range(size) if limit is None or limit >= size else sorted(random.Random(seed).sample(range(size), limit))
    problems = pool(split, size)
    return [
        {
            "id": f"starter-code/{split}/{index:05d}",
            "question": problems[index].question,
            "answer": problems[index].solution,
            "entry_point": problems[index].function,
            "test": problems[index].tests,
            "prelude": "",
            "family": problems[index].family,
        }
        for index in kept
    ]
