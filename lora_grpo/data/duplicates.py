"""Rows with the same problem: repeated within a split, or in both training and evaluation."""

import json
from collections.abc import Sequence
from typing import Any

from lora_grpo.config import DataConfig
from lora_grpo.grading import Row
from lora_grpo.tasks import get_task, is_users_task


def unique_rows(rows: Sequence[Row], task: str) -> list[Row]:
    """Return the rows without those that repeat the question of an earlier one."""
    first_rows: dict[str, Row] = {}
    for row in rows:
        # A user's `check` may read any column, so rows of a task file are equal only if all their columns are.
        key = _all_columns(row) if is_users_task(task) else _question(row, task)
        first_rows.setdefault(key, row)
    return list(first_rows.values())


def without_problems_of(evaluation: Sequence[Row], train: Sequence[Row], data: DataConfig) -> list[Row]:
    """Return the training rows whose problems are not in the evaluation rows."""
    evaluated: set[Any] = set()
    for row in evaluation:
        evaluated |= _problem_keys(row, data.evaluation_task, data)
    return [row for row in train if evaluated.isdisjoint(_problem_keys(row, data.task, data))]


def _problem_keys(row: Row, task: str, data: DataConfig) -> set[Any]:
    """Return the keys of a row's problem. Rows of two splits have the same problem if they share a key."""
    keys: set[Any] = {_question(row, task)}
    if "entry_point" in row and data.task != data.evaluation_task:  # MBPP+ has problems of MBPP in other words
        keys.add((row["id"], row["entry_point"]))
    return keys


def _question(row: Row, task: str) -> str:
    """Return what is asked in a row: its question, or the messages of its prompt, without the system prompt.

    Rows of an environment or an agent often have the same question and differ in other columns, so all columns count.
    """
    definition = get_task(task)
    if definition.environment or definition.agent:
        return _all_columns(row)
    # Rows of a task file may have messages already. Other rows get them later.
    messages = [message["content"] for message in row.get("prompt", ()) if message["role"] != "system"]
    return "\n".join(messages or [row["question"]]).strip()


def _all_columns(row: Row) -> str:
    """Return all columns of a row but its id, as text."""
    columns = {**row, "id": None, "loaded_row": {**row["loaded_row"], "id": None}}
    return json.dumps(columns, sort_keys=True)
