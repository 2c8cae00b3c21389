"""The `Task` protocol, and lookup of tasks by name."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

from lora_grpo import python_objects, starter
from lora_grpo.config import DataConfig
from lora_grpo.errors import UserError, suggestion
from lora_grpo.files import python_file
from lora_grpo.grading import Row, Verdict, numbers, programs

CODE_TASKS = ("code-with-feedback", "humaneval", "humaneval-plus", "mbpp", "mbpp-plus", "starter-code")
"""Tasks with programs as completions, graded by unit tests. Their rows have the columns listed in `code_grading`."""

MATH_TASKS = ("aime24", "aime25", "math", "math500")
"""Tasks of `mathematics`."""

TASK_NAMES = (*CODE_TASKS, *MATH_TASKS, "gsm8k", "ifbench", "ifeval", "starter")

_READERS = {"code-with-feedback": "code_feedback", "textarena": "textarena_games", "reasoning-gym": "reasoning_gym"}
_READERS |= {**dict.fromkeys(MATH_TASKS, "mathematics"), **dict.fromkeys(("ifbench", "ifeval"), "instructions")}
"""The module whose `read(name)` returns the task, by the name of the task or the part of it before a colon."""


class Task(Protocol):
    """The functions of a task module.

    A task that can check a batch faster than single completions also has `check_many(completions, rows)`.
    """

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        """Return the rows of the split "train" or "eval". Raises UserError for a missing source or a malformed row.

        Args:
            source: path of a JSON Lines, CSV or Parquet file, a Hub dataset id, or None for the task's default.
            columns: the source's name of a column for each of ours. Only tasks with `COLUMNS` accept it.
        """

    def check(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Grade one completion, which may be any string, against its row."""

    def gold(self, row: Mapping[str, Any]) -> Any:
        """Return a completion in the row's `prompt_style` that `check` accepts.

        With an environment, return the messages of the model in a conversation that passes.
        """


def runs_programs(data: DataConfig, also: Sequence[str] = ()) -> bool:
    """Return whether grading these tasks, and others, requires running programs written by the model."""
    return bool({data.task, data.evaluation_task, *also} & {*CODE_TASKS})


def is_task_file(name: str) -> bool:
    """Return whether a task is a user's Python file."""
    return name.endswith(".py")


def is_own_task(name: str) -> bool:
    """Return whether a task is a user's: a Python file, or an object of this process."""
    return is_task_file(name) or python_objects.is_name(name)


def task_title(name: str) -> str:
    """Return the name of a task without the folder of its file."""
    return Path(name).stem if is_task_file(name) else python_objects.title(name)


def same_task(first: str, second: str) -> bool:
    """Return whether two names are of the same task, or two paths of the same file."""
    paths = [Path(name).expanduser().resolve() for name in (first, second)]
    return first == second or (is_task_file(first) and paths[0] == paths[1])


def source_of_rows(name: str) -> str:
    """Return the source of the training rows of a task: "--data.train", or the `load` of a task file."""
    return "--data.train" if getattr(get_task(name), "takes_source", True) else f"load in {Path(name).name}"


def task_sha256(name: str) -> str | None:
    """Return the SHA-256 of a task file and the modules beside it that it imports; None for a task of this package."""
    if python_objects.is_name(name):
        return python_objects.describe(name)["sha256"]
    return python_file.sha256(Path(name)) if is_task_file(name) else None


def get_task(name: str) -> Task:
    """Return a task by its name or file, or raise UserError if there is none. A file is run."""
    if python_objects.is_name(name):
        return cast(Task, python_objects.find(name))
    reader = "task_file" if is_task_file(name) else _READERS.get(name.partition(":")[0])
    if reader:
        return cast(Task, importlib.import_module(f"lora_grpo.tasks.{reader}").read(name))
    if name not in TASK_NAMES:
        expected = f"expected one of {', '.join(TASK_NAMES)}, reasoning-gym:NAME, textarena:NAME, or a file: my_task.py"
        raise UserError(f"unknown task {name!r}; {suggestion(name, [*TASK_NAMES, *_READERS], expected)}")
    if not name.startswith("starter"):
        module = importlib.import_module(f"lora_grpo.tasks.{name.removesuffix('-plus')}")
        if not name.endswith("-plus"):
            return cast(Task, module)
        shared = {each: getattr(module, each) for each in ("check", "check_many", "gold")}
        return cast(Task, SimpleNamespace(load=module.load_plus, HUB_DATASET=module.PLUS_DATASET, **shared))

    def load(split: str, source: str | None = None) -> list[Row]:
        if source is not None:
            raise UserError(f"the {name} task uses its bundled problems, got source {source!r}; remove the source")
        return starter.problems(name, split)

    graders = vars(numbers if name == "starter" else programs)
    functions = {each: graders[each] for each in ("check", "check_many", "gold") if each in graders}
    return cast(Task, SimpleNamespace(load=load, **functions))


def grade_all(task_name: str, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Grade B completions of one task against their B rows."""
    task = get_task(task_name)
    if check_many := getattr(task, "check_many", None):
        return list(check_many(completions, rows))
    return [task.check(completion, row) for completion, row in zip(completions, rows, strict=True)]
