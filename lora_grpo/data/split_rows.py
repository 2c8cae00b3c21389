"""The rows of a split as their task loads them, from its own dataset or from `--data.train` and `--data.eval`."""

from pathlib import Path

from lora_grpo.config import DataConfig
from lora_grpo.errors import UserError, suggestion
from lora_grpo.grading import Row
from lora_grpo.tasks import Generator, get_task, is_task_file


def load_split(data: DataConfig, split: str) -> list[Row]:
    """Return all rows of the split "train" or "eval", without prompts."""
    task_name, source = _task_and_source(data, split)
    task = get_task(task_name)
    columns = columns_of(data, split)
    if isinstance(task, Generator):
        return task.load(split, source, options=data.options)
    if columns:
        return task.load(split, source, columns)
    return task.load(split, source)


def columns_of(data: DataConfig, split: str) -> dict[str, str]:
    """Return the columns that `data.columns` renames in the source of a split, as {our name: the source's name}.

    The columns of the task's own dataset already have our names.

    Raises:
        UserError: a pair is malformed, a name is unknown or repeated, or no task of the run takes `data.options`.
    """
    if data.options:
        tasks = [get_task(name) for name in (data.task, data.evaluation_task)]
        if not any(isinstance(task, Generator) for task in tasks):
            raise UserError(
                f"--data.options {data.options[0]}: only tasks of reasoning-gym have options, not {data.task}"
            )

    known_names = sorted({*_renameable(data, "train"), *_renameable(data, "eval")})
    columns: dict[str, str] = {}
    for pair in data.columns:
        name, _, column = pair.partition("=")
        if name not in known_names or not column:
            fallback = f"those of your own rows are: {', '.join(known_names) or 'none'}"
            if not known_names and is_task_file(data.task):
                fallback = f"load in {Path(data.task).name} makes its columns, so rename them there"
            hint = suggestion(name, known_names, otherwise=fallback)
            raise UserError(f"--data.columns {pair!r}: expected NAME=COLUMN with a column of the task; {hint}")
        if name in columns:
            raise UserError(f"--data.columns {pair!r}: {name} is {columns[name]!r} already; name it once")
        columns[name] = column

    names_of_split = _renameable(data, split)
    return {name: column for name, column in columns.items() if name in names_of_split}


def _renameable(data: DataConfig, split: str) -> tuple[str, ...]:
    """Return our names of the columns that a user's source for a split may name otherwise."""
    task_name, source = _task_and_source(data, split)
    if not source:
        return ()
    return get_task(task_name).COLUMNS


def _task_and_source(data: DataConfig, split: str) -> tuple[str, str | None]:
    if split == "train":
        return data.task, data.train
    return data.evaluation_task, data.eval
