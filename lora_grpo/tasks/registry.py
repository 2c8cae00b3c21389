"""The `Task` protocol, and lookup of tasks by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, get_args

from lora_grpo.config import DataConfig
from lora_grpo.errors import UserError, suggestion

Row = dict[str, Any]
"""A flat, JSON-serializable dictionary with at least `id`, `question` and `answer`."""

CODE_TASKS = ("humaneval", "mbpp", "starter-code")
"""Tasks with programs as completions, graded by unit tests. Their rows have the columns listed in `code_grading`."""

UNGRADED_TASKS = ("prompts",)
"""Tasks without correct answers. Every non-empty completion passes."""

ONE_SPLIT_TASKS = ("humaneval",)
"""Benchmarks without a training split. Rows used for training are removed from the evaluation set."""

GradedTask = Literal["gsm8k", "humaneval", "mbpp", "starter", "starter-code"]
TASK_NAMES = (*get_args(GradedTask), *UNGRADED_TASKS)


@dataclass(frozen=True)
class Verdict:
    """The grade of one completion."""

    passed: bool
    """Whether the completion is correct according to the task's main rule."""
    reason: str
    """A short slug: `correct`, `wrong_answer`, `no_answer`, `conflicting_answers`, `empty`, ... For programs, `no_code`
    or the sandbox's status."""
    extracted: str | None = None
    """The graded answer or program, as it appears in the completion; None if there is none."""
    rules: Mapping[str, bool] = field(default_factory=dict)
    """The result of each rule of the task, such as `{"strict": False, "flexible": True, "robust": True}`."""
    detail: str | None = None
    """An additional line, such as the failed assertion."""


class Task(Protocol):
    """The functions of a task module.

    A task that can check a batch faster than single completions also has `check_many(completions, rows)`.
    """

    def load(self, split: str, source: str | None = None) -> list[Row]:
        """Return the rows of the split "train" or "eval".

        Args:
            source: path of a JSON Lines file, a Hub dataset id, or None for the task's default.

        Raises:
            UserError: the source is missing or empty, or a row is malformed. The message includes the file and line.
        """
        ...

    def check(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Grade one completion, which may be any string, against its row."""
        ...

    def gold(self, row: Mapping[str, Any]) -> str:
        """Return a completion in the row's `prompt_style` that `check` accepts."""
        ...


def runs_programs(data: DataConfig) -> bool:
    """Return whether grading these tasks requires running programs written by the model."""
    return bool({data.task, data.evaluation_task} & {*CODE_TASKS})


def get_task(name: str) -> Task:
    """Return the task module with this name, or raise UserError if there is none."""
    if name not in TASK_NAMES:
        raise UserError(f"unknown task {name!r}; {suggestion(name, TASK_NAMES)}")
    return cast(Task, importlib.import_module(f"lora_grpo.tasks.{name.replace('-', '_')}"))


def grade_all(task_name: str, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Grade B completions of one task against their B rows."""
    task = get_task(task_name)
    if check_many := getattr(task, "check_many", None):
        return list(check_many(completions, rows))
    return [task.check(completion, row) for completion, row in zip(completions, rows, strict=True)]
