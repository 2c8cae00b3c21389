"""The starter task: generated grade-school word problems, graded as GSM8K is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_grpo.starter import problems
from lora_grpo.tasks import gsm8k, sources
from lora_grpo.tasks.registry import Row, Verdict

POOL_SIZES = {"train": 4000, "eval": 1000}


def load(split: str, source: str | None = None, limit: int | None = None, seed: int = 0) -> list[Row]:
    """Return the rows of `split`; the pools are fixed, so that an id names the same problem for every seed.

    Args:
        split: "train" or "eval"; no problem is in both (see `lora_grpo.starter.problems`).
        source: must be None: the problems are generated.
        limit: keep this many rows, drawn with `seed` without replacement and kept in order; None keeps all.
        seed: seed of that draw.

    Raises:
        UserError: a source is given, the split is unknown, or the limit is less than 1.
    """
    sources.check_generated("starter", split, source, limit)
    kept = sources.draw(list(enumerate(problems.pool(split, POOL_SIZES[split]))), limit, seed)
    return [
        {
            "id": f"starter/{split}/{index:05d}",
            "question": problem.question,
            "answer": problem.answer,
            "family": problem.family,
            "difficulty": problem.difficulty,
        }
        for index, problem in kept
    ]


def grade(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade one completion against one row with GSM8K's grader."""
    return gsm8k.grade(completion, row)


def gold_completion(row: Mapping[str, Any]) -> str:
    """Return the worked solution in the row's `prompt_style`."""
    return gsm8k.gold_completion(row)
