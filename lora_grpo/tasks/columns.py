"""The columns of a user's data: which names are taken, and which columns rewards get.

A row has entries of its own, such as `question`, `prompt` and `task`. A column of the data may have the same name and
another value. So the columns are also kept apart, as they were loaded, in the entry `loaded_row`: rewards get them, and
so do the functions of a task file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.grading import Row

REWARD_ARGUMENTS = frozenset(
    {"prompts", "completions", "completion_ids", "verdicts", "trainer_state", "log_extra", "log_metric", "environments"}
    | {"self"}
)
"""Arguments of rewards that are not columns; `self` is that of a method. A column with such a name cannot be passed."""

ROW_ENTRIES = frozenset({"prompt", "prompt_style", "task", "loaded_row", "reset_text", "tools", "completion_prefix"})
"""Entries of a row that lora_grpo adds and reads. A column with such a name is in `loaded_row` only."""


def with_record(row: Row, record: Mapping[str, Any], where: str) -> Row:
    """Return a row of a built-in task, with its record as `loaded_row` if the row itself lacks some of its columns.

    Args:
        row: what the task made of the record.
        record: the columns as they were loaded. Its `id` may be any value, while the row's is a text.
        where: location of the record.

    Raises:
        UserError: a column has the name of another argument of rewards.
    """
    check_names(record, where)
    columns = own_columns(row)
    if all(name in columns and columns[name] == value for name, value in record.items()):
        return row
    return {**row, "loaded_row": {"id": row["id"], **record}}


def own_columns(record: Mapping[str, Any]) -> Row:
    """Return the columns of a record or a row without the names that lora_grpo uses for entries of its own."""
    return {name: value for name, value in record.items() if name not in ROW_ENTRIES}


def reward_columns(row: Mapping[str, Any]) -> Row:
    """Return the columns of a row that rewards get: as they were loaded, and what the task has added."""
    return {**own_columns(row), **row.get("loaded_row", {})}


def check_names(record: Mapping[str, Any], where: str) -> None:
    """Raise UserError if a column cannot be passed to rewards under its name."""
    for name in record:
        if not isinstance(name, str):
            raise UserError(f"{where}: the column {name!r:.60} is a {type(name).__name__}; expected a name, as a text")
        if name in REWARD_ARGUMENTS:
            raise UserError(
                f"{where}: a column cannot be named {name!r}, because rewards get something else under this name; "
                "rename it"
            )


def row_ids(records: Sequence[Mapping[str, Any]], prefix: str) -> list[str]:
    """Return the id of each row: the record's `id` as a text, if each record has one of its own, or `prefix`/index."""
    ids = [record.get("id") for record in records]
    if all(is_id(value) for value in ids):
        names = [str(value) for value in ids]
        if len(set(names)) == len(names):
            return names
    return [f"{prefix}/{index}" for index in range(len(records))]


def is_id(value: Any) -> bool:
    """Return whether a value can name a row: an integer, or a text that is not empty."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, str) and value.strip() != "")
