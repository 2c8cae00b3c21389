"""What a task is: rows to ask, and one grader that training and evaluation share.

A task is a module of this package with the functions of `Task`. A row is a flat, JSON-serialisable dict; every row has
`id`, `question` and `answer`, and `prompts.add_prompts` adds `prompt` (chat messages) and `prompt_style`. Rows of the
`CODE_TASKS` have besides what `code_grading` needs to run their tests.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from lora_grpo.config import DataConfig
from lora_grpo.errors import UserError

Row = dict[str, Any]

CODE_TASKS = ("humaneval", "mbpp", "starter-code")
"""The tasks whose answers are programs, decided by running their tests; their prompt style is `code`."""

UNGRADED_TASKS = ("prompts",)
"""The tasks without right answers: what passes says only that something was said."""

TASK_NAMES = ("gsm8k", "prompts", "starter", *CODE_TASKS)


@dataclass(frozen=True)
class Verdict:
    """What the grader found in one completion."""

    passed: bool
    """The task's headline rule: is this sample correct?"""
    reason: str
    """A short slug, e.g. `correct`, `wrong_answer`, `no_answer`, `conflicting_answers`, `empty`; for programs the
    sandbox's `passed`, `failed`, `timeout`, `memory`, `crashed`, `blocked` or `invalid`, or `no_code`."""
    extracted: str | None = None
    """The answer that the headline rule read, as it stands in the completion, or the program that ran; None where there
    is none."""
    rules: Mapping[str, bool] = field(default_factory=dict)
    """Every rule the task reports side by side, e.g. `{"strict": False, "flexible": True, "robust": True}`."""
    detail: str | None = None
    """One line more, e.g. the assertion that failed."""


class Task(Protocol):
    """The protocol that a task's module implements with plain functions.

    A task that grades many completions faster than one by one has `grade_many(completions, rows) -> list[Verdict]` too.
    """

    def load(self, split: str, source: str | None, limit: int | None, seed: int) -> list[Row]:
        """Return the rows of `split` ("train" or "eval").

        Args:
            split: "train" or "eval".
            source: path of a `.jsonl` file, a Hub dataset id, or None for the task's default source.
            limit: keep this many rows, drawn with `seed` without replacement and kept in file order; None keeps all.
            seed: seed of that draw (and of generated rows, for tasks that generate).

        Raises:
            UserError: the file is missing, empty, or a row is malformed (the message gives file and line number).
        """
        ...

    def grade(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Grade one completion (the assistant's text alone) against one row. Pure; never raises on a completion."""
        ...

    def gold_completion(self, row: Mapping[str, Any]) -> str:
        """Return a completion in the row's `prompt_style` that `grade` must accept."""
        ...


def runs_programs(data: DataConfig) -> bool:
    """Whether grading these tasks runs what the model wrote."""
    return bool({data.task, data.evaluation_task} & {*CODE_TASKS})


def get_task(name: str) -> Task:
    """Return the task module called `name`.

    Raises:
        UserError: there is no such task; the nearest name is offered.
    """
    if name not in TASK_NAMES:
        near = difflib.get_close_matches(name, TASK_NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(TASK_NAMES)}"
        raise UserError(f"unknown task {name!r}; {hint}")
    return cast(Task, importlib.import_module(f"lora_grpo.tasks.{name.replace('-', '_')}"))


def grade_all(task_name: str, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Grade completions of one task, all at once where the task can.

    Args:
        task_name: one of `TASK_NAMES`.
        completions: B texts.
        rows: B rows, the one that each completion answers.

    Raises:
        UserError: there is no such task, or a row cannot be graded.
        RunError: the sandbox cannot run, or a row's tests cannot.
    """
    task = get_task(task_name)
    if len(completions) != len(rows):
        raise ValueError(f"got {len(completions)} completions for {len(rows)} rows")
    grade_many = getattr(task, "grade_many", None)
    if grade_many is not None:
        return list(grade_many(completions, rows))
    return [task.grade(completion, row) for completion, row in zip(completions, rows, strict=True)]
