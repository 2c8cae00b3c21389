"""What a task is, and how to find one by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from lora_grpo.config import DataConfig
from lora_grpo.errors import UserError, suggestion

Row = dict[str, Any]
"""A flat, JSON-serializable dictionary with at least `id`, `question` and `answer`."""

CODE_TASKS = ("humaneval", "mbpp", "starter-code")
"""Tasks whose completions are programs, graded by running unit tests; their rows have the columns of `code_grading`."""

UNGRADED_TASKS = ("prompts",)
"""Tasks without correct answers: every completion that is not empty passes."""

TASK_NAMES = ("gsm8k", "prompts", "starter", *CODE_TASKS)


@dataclass(frozen=True)
class Verdict:
    """The grade of one completion."""

    passed: bool
    """Whether the completion is correct by the task's headline rule."""
    reason: str
    """A short slug: `correct`, `wrong_answer`, `no_answer`, `conflicting_answers`, `empty`, ...; for programs `no_code`
    or the sandbox's status."""
    extracted: str | None = None
    """The answer or program that was graded, as it appears in the completion; None if there is none."""
    rules: Mapping[str, bool] = field(default_factory=dict)
    """The result of every rule that the task reports, e.g. `{"strict": False, "flexible": True, "robust": True}`."""
    detail: str | None = None
    """One more line, e.g. the assertion that failed."""


class Task(Protocol):
    """The functions of a task's module.

    A task that grades a batch faster than one completion at a time also has `grade_many(completions, rows)`.
    """

    def load(self, split: str, source: str | None, limit: int | None, seed: int) -> list[Row]:
        """Return the rows of a split.

        Args:
            split: "train" or "eval".
            source: path of a JSON-lines file, a Hub dataset id, or None for the task's default.
            limit: number of rows to sample without replacement, kept in file order; None keeps all.
            seed: seed of that sample.

        Raises:
            UserError: the source is missing or empty, or a row is malformed; the message names file and line.
        """
        ...

    def grade(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Grade one completion (the assistant's text only) against its row; any text is gradable."""
        ...

    def gold_completion(self, row: Mapping[str, Any]) -> str:
        """Return a completion in the row's `prompt_style` that `grade` accepts."""
        ...


def runs_programs(data: DataConfig) -> bool:
    """Return whether grading these tasks runs programs that the model wrote."""
    return bool({data.task, data.evaluation_task} & {*CODE_TASKS})


def get_task(name: str) -> Task:
    """Return the task module called `name`.

    Raises:
        UserError: there is no such task.
    """
    if name not in TASK_NAMES:
        raise UserError(f"unknown task {name!r}; {suggestion(name, TASK_NAMES)}")
    return cast(Task, importlib.import_module(f"lora_grpo.tasks.{name.replace('-', '_')}"))


def grade_all(task_name: str, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Grade a batch of completions of one task.

    Args:
        task_name: one of `TASK_NAMES`.
        completions: B completions.
        rows: B rows, one per completion.

    Raises:
        UserError: there is no such task, or a row cannot be graded.
        RunError: the sandbox or a row's tests cannot run.
    """
    task = get_task(task_name)
    if len(completions) != len(rows):
        raise ValueError(f"got {len(completions)} completions for {len(rows)} rows")
    if grade_many := getattr(task, "grade_many", None):
        return list(grade_many(completions, rows))
    return [task.grade(completion, row) for completion, row in zip(completions, rows, strict=True)]
