"""The table of built-in tasks, and lookup of tasks by name.

To add a task, write a module with a class like `GSM8K` in gsm8k.py and a function `make_task`, add a line to `TASKS`,
and add an entry to cli/tasks.toml, which `lora-grpo tasks` and docs/tasks.md list. CONTRIBUTING.md has all steps.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lora_grpo import python_objects
from lora_grpo.config import DataConfig, RunConfig
from lora_grpo.errors import UserError, suggestion
from lora_grpo.files import python_file
from lora_grpo.grading import Verdict
from lora_grpo.tasks import (
    bfcl,
    code_feedback,
    gsm8k,
    humaneval,
    instructions,
    mathematics,
    mbpp,
    reasoning_gym,
    starter_problems,
    task_file,
    textarena_games,
)
from lora_grpo.tasks.task import Task


@dataclass(frozen=True)
class BuiltIn:
    """A line of the table."""

    make_task: Callable[[str], Task]
    """Returns the task of a name, or raises UserError if a package that it needs is not installed."""
    runs_programs: bool = False
    """Whether completions are programs, which unit tests grade in the sandbox."""


TASKS = {
    "code-with-feedback": BuiltIn(code_feedback.make_task, runs_programs=True),
    "humaneval": BuiltIn(humaneval.make_task, runs_programs=True),
    "humaneval-plus": BuiltIn(humaneval.make_task, runs_programs=True),
    "mbpp": BuiltIn(mbpp.make_task, runs_programs=True),
    "mbpp-plus": BuiltIn(mbpp.make_task, runs_programs=True),
    "starter-code": BuiltIn(starter_problems.make_task, runs_programs=True),
    "aime24": BuiltIn(mathematics.make_task),
    "aime25": BuiltIn(mathematics.make_task),
    "math": BuiltIn(mathematics.make_task),
    "math500": BuiltIn(mathematics.make_task),
    "bfcl": BuiltIn(bfcl.make_task),
    "gsm8k": BuiltIn(gsm8k.make_task),
    "ifbench": BuiltIn(instructions.make_task),
    "ifeval": BuiltIn(instructions.make_task),
    "starter": BuiltIn(starter_problems.make_task),
}
"""The tasks of this package, by name."""

FAMILIES = {
    "reasoning-gym": BuiltIn(reasoning_gym.make_task),
    "textarena": BuiltIn(textarena_games.make_task),
}
"""Packages with many tasks, by what stands before the colon: `reasoning-gym:countdown`."""

TASK_NAMES = tuple(TASKS)
CODE_TASKS = tuple(name for name, task in TASKS.items() if task.runs_programs)
"""Tasks with programs as completions. Their rows have the columns that `lora_grpo/grading/programs.py` describes."""
MATH_TASKS = tuple(name for name, task in TASKS.items() if task.make_task is mathematics.make_task)
"""Tasks whose answers are compared by math-verify."""


def get_task(name: str) -> Task:
    """Return a task by its name or file, or raise UserError if there is none. A file is run."""
    if python_objects.is_name(name):
        return cast(Task, python_objects.find(name))
    if is_task_file(name):
        return task_file.load_task_file(name)
    family, _, _ = name.partition(":")
    built_in = TASKS.get(name) or FAMILIES.get(family)
    if built_in is None:
        expected = f"expected one of {', '.join(TASKS)}, reasoning-gym:NAME, textarena:NAME, or a file: my_task.py"
        raise UserError(f"unknown task {name!r}; {suggestion(name, [*TASKS, *FAMILIES], expected)}")
    return built_in.make_task(name)


def grade_all(task_name: str, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Grade B completions of one task against their B rows."""
    return get_task(task_name).check_many(completions, rows)


def runs_programs(data: DataConfig, also: Sequence[str] = ()) -> bool:
    """Return whether grading these tasks, and others, requires running programs written by the model."""
    return any(name in CODE_TASKS for name in (data.task, data.evaluation_task, *also))


def has_conversations(config: RunConfig) -> bool:
    """Return whether a run samples conversations or an agent's episodes, in training or in an evaluation."""
    names = (config.data.task, config.data.evaluation_task, *config.eval.also)
    tasks = [get_task(name) for name in names]
    return any(task.environment or task.agent for task in tasks)


def is_task_file(name: str) -> bool:
    """Return whether a task is a user's Python file."""
    return name.endswith(".py")


def is_users_task(name: str) -> bool:
    """Return whether a task is a user's: a Python file, or an object of this process."""
    return is_task_file(name) or python_objects.is_name(name)


def task_title(name: str) -> str:
    """Return the name of a task without the folder of its file."""
    return Path(name).stem if is_task_file(name) else python_objects.title(name)


def same_task(first: str, second: str) -> bool:
    """Return whether two names are of the same task, or two paths of the same file."""
    if not is_task_file(first):
        return first == second
    return Path(first).expanduser().resolve() == Path(second).expanduser().resolve()


def source_of_rows(name: str) -> str:
    """Return where the training rows of a task come from: "--data.train", or the `load` of a task file."""
    return "--data.train" if get_task(name).takes_source else f"load in {Path(name).name}"


def task_files(name: str) -> list[Path]:
    """Return a task file, the files of its folder that its `AGENT` names, and the modules beside them that they import.

    The task file is run, and comes first.
    """
    files = python_file.files(Path(name))
    folder = files[0].parent
    agent = get_task(name).agent
    for argument in agent.command if agent else ():
        with contextlib.suppress(OSError):  # a program in an argument is too long for the name of a file
            program = (folder / argument).resolve()
            if program.is_file() and program.is_relative_to(folder):
                files += python_file.files(program)
    return list(dict.fromkeys(files))


def task_sha256(name: str) -> str | None:
    """Return the SHA-256 of a task file and of the files that belong to it; None for a task of this package.

    Of an object of this process, it is that of its source code, or "unknown" if it has none.
    """
    if python_objects.is_name(name):
        return python_objects.describe(name)["sha256"] or "unknown"
    return python_file.sha256(task_files(name)) if is_task_file(name) else None
