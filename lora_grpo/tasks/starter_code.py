"""The starter code task: generated problems about tiny Python functions, graded with unit tests."""

from __future__ import annotations

from lora_grpo.starter import code_problems
from lora_grpo.tasks import sources
from lora_grpo.tasks.code_grading import gold_completion, grade, grade_many
from lora_grpo.tasks.registry import Row

__all__ = ["gold_completion", "grade", "grade_many", "load"]


def load(split: str, source: str | None = None, limit: int | None = None, seed: int = 0) -> list[Row]:
    """Return the generated rows of a split; see `Task.load`. No problem is in both splits."""
    return sources.generate("starter-code", code_problems.pool, _row, split, source, limit, seed)


def _row(problem: code_problems.CodeProblem) -> Row:
    return {
        "question": problem.question,
        "answer": problem.solution,
        "entry_point": problem.function,
        "test": problem.tests,
        "prelude": "",
        "family": problem.family,
    }
