"""The starter task: generated grade-school word problems, graded like GSM8K."""

from __future__ import annotations

from lora_grpo.starter import problems
from lora_grpo.tasks import sources
from lora_grpo.tasks.gsm8k import gold_completion, grade
from lora_grpo.tasks.registry import Row

__all__ = ["gold_completion", "grade", "load"]


def load(split: str, source: str | None = None, limit: int | None = None, seed: int = 0) -> list[Row]:
    """Return the generated rows of a split; see `Task.load`. No problem is in both splits."""
    return sources.generate("starter", problems.pool, _row, split, source, limit, seed)


def _row(problem: problems.Problem) -> Row:
    return {
        "question": problem.question,
        "answer": problem.answer,
        "family": problem.family,
        "difficulty": problem.difficulty,
    }
