"""The starter code task: generated problems about tiny Python functions, graded by their unit tests."""

from __future__ import annotations

from lora_grpo.starter import code_problems
from lora_grpo.tasks import sources
from lora_grpo.tasks.code_grading import gold_completion, grade, grade_many
from lora_grpo.tasks.registry import Row

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
    sources.check_generated("starter-code", split, source, limit)
    kept = sources.draw(list(enumerate(code_problems.pool(split, POOL_SIZES[split]))), limit, seed)
    return [
        {
            "id": f"starter-code/{split}/{index:05d}",
            "question": problem.question,
            "answer": problem.solution,
            "entry_point": problem.function,
            "test": problem.tests,
            "prelude": "",
            "family": problem.family,
        }
        for index, problem in kept
    ]
