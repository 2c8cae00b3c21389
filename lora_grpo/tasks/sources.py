"""Read the records of a task from a JSON Lines file or the Hub, validate them, and sample them."""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from lora_grpo import starter
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import json_files
from lora_grpo.tasks.registry import Row

Item = TypeVar("Item")

_FILE_SUFFIXES = {".jsonl", ".json", ".ndjson", ".json-lines", ".csv", ".parquet", ".txt", ".gz"}


def check_request(split: str, limit: int | None) -> None:
    """Check a split and a limit.

    Raises:
        UserError: the split is neither "train" nor "eval", or the limit is less than 1.
    """
    if split not in ("train", "eval"):
        raise UserError(f"split={split!r}; expected 'train' or 'eval'")
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit}; expected at least 1 row, or no limit")


def sample(rows: Sequence[Item], limit: int | None, seed: int) -> list[Item]:
    """Sample `limit` rows without replacement, in their original order; None keeps all rows."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), limit))]


def load_bundled(task: str, split: str, source: str | None, limit: int | None, seed: int) -> list[Row]:
    """Return bundled rows of the task "starter" or "starter-code"; see `Task.load`. No problem is in both splits."""
    if source is not None:
        raise UserError(f"the {task} task uses its bundled problems, got source {source!r}; remove the source")
    check_request(split, limit)
    return sample(starter.problems(task, split), limit, seed)


def is_on_hub(source: str | None) -> bool:
    """Return whether a source is a Hub dataset id. A source that looks like a path is never looked up on the Hub."""
    if source is None:
        return True
    path = Path(source).expanduser()
    looks_like_path = source.startswith((".", "~", "/")) or path.suffix.lower() in _FILE_SUFFIXES
    return not looks_like_path and not path.exists()


def read_file(source: str, keys: str) -> list[tuple[str, Any]]:
    """Return the records of a JSON Lines file, each with its "file:line".

    Args:
        source: the path. A `.gz` file is decompressed.
        keys: the keys of a record for error messages, such as "'question' and 'answer'".

    Raises:
        UserError: see `json_files.read_lines`.
    """
    return list(json_files.read_lines(Path(source).expanduser(), f"a JSON-lines file with {keys} on each line"))


def read_hub(name: str, config: str | None, split: str) -> list[tuple[str, Any]]:
    """Return the records of a Hub dataset, each with its location.

    Raises:
        UserError: the dataset cannot be loaded, or has no rows.
    """
    try:
        import datasets

        records = list(datasets.load_dataset(name, config, split=split))
    except Exception as error:
        # Offline, missing, gated, and misspelled datasets raise many exception types, including httpx's and OSError.
        raise UserError(
            f"cannot load split {split!r} of {name!r} from the Hub ({first_line(error)}); "
            "pass a local JSON-lines file with --data.train or --data.eval"
        ) from error
    if not records:
        raise UserError(f"{name!r} has no rows in split {split!r}")
    return [(f"{name} ({split}) row {i}", record) for i, record in enumerate(records)]


def texts(record: Any, keys: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return a record's values for these keys. All values must be non-empty strings.

    Raises:
        UserError: the record is not an object, or a value is missing, empty or not a string.
    """
    if not isinstance(record, dict):
        raise UserError(f"{where}: got {type(record).__name__}; expected an object with {', '.join(map(repr, keys))}")
    for key in keys:
        value = record.get(key)
        if not isinstance(value, str) or not value.strip():
            got = "is missing" if key not in record else "is empty" if value in ("", None) else f"is {value!r:.60}"
            raise UserError(f"{where}: {key!r} {got}; expected a non-empty string")
    return tuple(record[key] for key in keys)


def check_python(text: str, name: str, where: str) -> ast.Module:
    """Parse the code in a record.

    Raises:
        UserError: the code is not valid Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MBPP has invalid escape sequences in strings.
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        line = f" (line {error.lineno}: {error.msg})" if isinstance(error, SyntaxError) else f" ({error})"
        raise UserError(f"{where}: {name!r} is not Python{line}; fix the row or remove it") from None


def check_ids(rows: list[Row], where: str) -> None:
    """Check that ids are unique.

    Raises:
        UserError: two rows share an id.
    """
    seen: set[str] = set()
    for row in rows:
        if row["id"] in seen:
            raise UserError(f"{where}: two rows have the id {row['id']!r}; remove one of them")
        seen.add(row["id"])
