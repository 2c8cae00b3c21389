"""Where a task's rows come from: a JSON-lines file or the Hub; and which of them are kept."""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lora_grpo.errors import UserError
from lora_grpo.files import json_files
from lora_grpo.tasks.registry import Row

Item = TypeVar("Item")

_FILE_SUFFIXES = {".jsonl", ".json", ".ndjson", ".json-lines", ".csv", ".parquet", ".txt", ".gz"}


def check_request(split: str, limit: int | None) -> None:
    """Refuse a split or a limit that no task has.

    Raises:
        UserError: the split is neither "train" nor "eval", or the limit is less than 1.
    """
    if split not in ("train", "eval"):
        raise UserError(f"split={split!r}; expected 'train' or 'eval'")
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit}; expected at least 1 row, or no limit")


def check_generated(task: str, split: str, source: str | None, limit: int | None) -> None:
    """Refuse what a task that generates its problems cannot be asked for.

    Raises:
        UserError: a source is given, or the split or the limit is none.
    """
    if source is not None:
        raise UserError(f"the {task} task generates its problems, got source {source!r}; leave the source out")
    if split not in ("train", "eval"):
        raise UserError(f"unknown split {split!r} of the {task} task; expected one of train, eval")
    check_request(split, limit)


def draw(rows: Sequence[Item], limit: int | None, seed: int) -> list[Item]:
    """Keep `limit` rows, drawn with `seed` without replacement and kept in order; None keeps all."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), limit))]


def is_on_hub(source: str | None) -> bool:
    """Tell a data set's name on the Hub from a path; what looks like a path is never tried on the Hub."""
    if source is None:
        return True
    path = Path(source).expanduser()
    looks_like_path = source.startswith((".", "~", "/")) or path.suffix.lower() in _FILE_SUFFIXES
    return not looks_like_path and not path.exists()


def read_file(source: str, keys: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSON-lines file, each with its "file:line".

    Args:
        source: its path; `.gz` is unpacked.
        keys: the keys of a line, for messages: "'question' and 'answer'".

    Raises:
        UserError: see `json_files.read_lines`.
    """
    return json_files.read_lines(Path(source).expanduser(), f"a JSON-lines file with {keys} on each line")


def read_hub(name: str, config: str | None, split: str) -> list[tuple[str, Any]]:
    """Return the records of a data set on the Hub, each with where it stands.

    Raises:
        UserError: the data set cannot be loaded, or has no rows.
    """
    try:
        import datasets

        records = list(datasets.load_dataset(name, config, split=split))
    except Exception as error:
        # Offline, missing, gated and misnamed data sets raise many types, httpx's and OSError's among them.
        cause = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"cannot load split {split!r} of {name!r} from the Hub ({cause}); "
            "pass a local JSON-lines file by --data.train or --data.eval"
        ) from error
    if not records:
        raise UserError(f"{name!r} has no rows in split {split!r}")
    return [(f"{name} ({split}) row {i}", record) for i, record in enumerate(records)]


def texts(record: Any, keys: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return the record's values of these keys, all of them texts with something in them.

    Raises:
        UserError: it is no object, or a value is missing, empty or not text.
    """
    names = " and ".join([", ".join(map(repr, keys[:-1])), repr(keys[-1])] if len(keys) > 1 else [repr(keys[-1])])
    if not isinstance(record, dict):
        raise UserError(f"{where}: got {type(record).__name__}; expected an object with {names}")
    for key in keys:
        value = record.get(key)
        if not isinstance(value, str) or not value.strip():
            got = "is missing" if key not in record else "is empty" if value in ("", None) else f"is {value!r:.60}"
            raise UserError(f"{where}: {key!r} {got}; expected a non-empty string")
    return tuple(record[key] for key in keys)


def check_python(text: str, name: str, where: str) -> ast.Module:
    """Return what a record's code parses to.

    Raises:
        UserError: it is not Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MBPP's strings have escapes that Python has come to warn of.
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        line = f" (line {error.lineno}: {error.msg})" if isinstance(error, SyntaxError) else f" ({error})"
        raise UserError(f"{where}: {name!r} is not Python{line}; mend the row or leave it out") from None


def check_ids(rows: list[Row], where: str) -> None:
    """Refuse rows of which two have one id.

    Raises:
        UserError: names the first such id.
    """
    seen: set[str] = set()
    for row in rows:
        if row["id"] in seen:
            raise UserError(f"{where}: two rows have the id {row['id']!r}; leave one of them out")
        seen.add(row["id"])
