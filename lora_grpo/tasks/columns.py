"""The columns of a user's data: which names are taken, and which columns rewards and task files get.

A row is a flat dictionary. Some of its entries are made by lora_grpo, such as `question`, `prompt` and `task`. A column
of the data may have the same name and another value, so the columns are also kept apart, as they were loaded, in the
entry `loaded_row`:

    {"id": "7", "question": "9 + 9?", "answer": "18", "loaded_row": {"id": 7, "answer": 18, "task": "sums", ...}}

Rewards and the functions of a task file get the columns from `loaded_row`; everything else reads the row itself. Rows
of a built-in task have no `loaded_row` if nothing would differ, and rows of a task file always have one.

The fingerprint of the rows covers `loaded_row` too, although it repeats values. An interrupted run compares the
fingerprint when it is resumed, so another form of the rows would end every run that was begun before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.grading import Row

REWARD_ARGUMENTS = frozenset(
    {
        "prompts",
        "completions",
        "completion_ids",
        "verdicts",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
        "self",
    }
)
"""Arguments of rewards that are not columns; `self` is that of a method. A column with such a name cannot be passed."""

ROW_ENTRIES = frozenset(
    {
        "prompt",
        "prompt_style",
        "prompt_tokens",
        "task",
        "loaded_row",
        "reset_text",
        "tools",
        "completion_prefix",
    }
)
"""Entries of a row that lora_grpo adds and reads. A column with such a name is in `loaded_row` only."""


def with_loaded_columns(row: Row, record: Mapping[str, Any], where: str) -> Row:
    """Return a row of a built-in task, with the columns of its record as `loaded_row` if the row lacks some of them.

    Args:
        row: what the task made of the record.
        record: the columns as they were loaded. Its `id` may be any value, while the row's is a text.
        where: location of the record.

    Raises:
        UserError: a column has the name of another argument of rewards.
    """
    check_names(record, where)
    columns = without_row_entries(row)
    if all(name in columns and columns[name] == value for name, value in record.items()):
        return row
    return {**row, "loaded_row": {"id": row["id"], **record}}


def without_row_entries(columns: Mapping[str, Any]) -> Row:
    """Return the columns of a record or a row without the names that lora_grpo uses for entries of its own."""
    return {name: value for name, value in columns.items() if name not in ROW_ENTRIES}


def loaded_columns(row: Mapping[str, Any]) -> Row:
    """Return the columns of a row as they were loaded: what the functions of a task file get."""
    return dict(row.get("loaded_row", row))


def reward_columns(row: Mapping[str, Any]) -> Row:
    """Return the columns of a row that rewards get: as they were loaded, and what the task has added."""
    return {**without_row_entries(row), **row.get("loaded_row", {})}


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
    """Return the id of each row: the record's `id` as a text, if each record has another one, or `prefix`/index."""
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
    if isinstance(value, str):
        return value.strip() != ""
    return isinstance(value, int)
