"""Read the records of a task from a JSON Lines file or the Hub, validate them, and sample them."""

from __future__ import annotations

import ast
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo import starter
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import json_files
from lora_grpo.tasks.registry import Row

_FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".parquet", ".txt", ".gz")
_HUB_SPLITS = {"train": "train", "eval": "test"}


def load_bundled(task: str, split: str, source: str | None = None) -> list[Row]:
    """Return bundled rows of the task "starter" or "starter-code"; see `Task.load`. No problem is in both splits."""
    if source is not None:
        raise UserError(f"the {task} task uses its bundled problems, got source {source!r}; remove the source")
    return starter.problems(task, split)


def sample(rows: Sequence[Row], limit: int | None, seed: int) -> list[Row]:
    """Sample `limit` rows without replacement, in their original order; None keeps all rows."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), limit))]


def is_on_hub(source: str) -> bool:
    """Return whether a source is a Hub dataset id. A source that looks like a path is never looked up on the Hub."""
    path = Path(source).expanduser()
    looks_like_path = source.startswith((".", "~", "/")) or path.suffix.lower() in _FILE_SUFFIXES
    return not looks_like_path and not path.exists()


def read(source: str, split: str, hub_config: str | None = None) -> list[tuple[str, Any]]:
    """Return the records of a JSON Lines file or Hub dataset, each with its location, such as "file:line".

    The split is "train", "eval" (the Hub's "test" split), or the Hub's name of a split. A file has no splits.
    """
    if not is_on_hub(source):
        return list(json_files.read_lines(Path(source).expanduser(), "a JSON Lines file"))
    split = _HUB_SPLITS.get(split, split)
    try:
        import datasets

        records = datasets.load_dataset(source, hub_config, split=split)
    except Exception as error:
        # Offline, missing, gated, and misspelled datasets raise many exception types, including httpx's and OSError.
        raise UserError(
            f"cannot load split {split!r} of {source!r} from the Hub ({first_line(error)}); "
            "pass a local JSON Lines file with --data.train or --data.eval"
        ) from error
    if not len(records):
        raise UserError(f"{source!r} has no rows in split {split!r}; pass another dataset or a local JSON Lines file")
    return [(f"{source} ({split}) row {i}", record) for i, record in enumerate(records)]


def texts(record: Any, keys: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return a record's values for these keys, or raise UserError unless all of them are non-empty strings."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: got {type(record).__name__}; expected an object with {', '.join(map(repr, keys))}")
    for key in keys:
        value = record.get(key)
        if not isinstance(value, str) or not value.strip():
            got = "is missing" if key not in record else "is empty" if value in ("", None) else f"is {value!r:.60}"
            raise UserError(f"{where}: {key!r} {got}; expected a non-empty string")
    return tuple(record[key] for key in keys)


def check_python(text: str, name: str, where: str) -> ast.Module:
    """Parse the code in a record, or raise UserError if it is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MBPP has invalid escape sequences in strings.
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        line = f" (line {error.lineno}: {error.msg})" if isinstance(error, SyntaxError) else f" ({error})"
        raise UserError(f"{where}: {name!r} is not Python{line}; fix the row or remove it") from None


def check_ids(rows: list[Row], where: str) -> None:
    """Raise UserError if two rows share an id."""
    name, count = Counter(row["id"] for row in rows).most_common(1)[0]
    if count > 1:
        raise UserError(f"{where}: {count} rows have the id {name!r}; keep one of them")
