"""Read the records of a task from a file (JSON Lines, CSV, Parquet) or the Hub, validate them, and sample them."""

import ast
import csv
import datetime
import decimal
import io
import json
import logging
import random
import uuid
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import python_objects
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import json_files
from lora_grpo.grading import Row
from lora_grpo.tasks.columns import REWARD_ARGUMENTS

_FLAGS = {"train": "--data.train", "eval": "--data.eval (not for a task of --eval.also)"}
"""The flags with the rows of a split, for errors. The tasks of --eval.also have the rows of their own datasets."""
_FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".parquet", ".txt", ".gz")


@dataclass(frozen=True)
class Record:
    """One record of a source."""

    where: str
    """Its location for error messages, such as "file:line"."""
    columns: Row
    """Its values by column, as they were written."""


def sample(rows: Sequence[Row], limit: int | None, seed: int) -> list[Row]:
    """Sample `limit` rows without replacement, in their original order; None keeps all rows."""
    if limit is None or limit >= len(rows):
        return list(rows)
    chosen = random.Random(seed).sample(range(len(rows)), limit)
    return [rows[index] for index in sorted(chosen)]


def is_on_hub(source: str) -> bool:
    """Return whether a source is a Hub dataset id. A source that looks like a path is never looked up on the Hub."""
    if python_objects.is_name(source):
        return False
    path = Path(source).expanduser()
    looks_like_path = source.startswith((".", "~", "/")) or path.suffix.lower() in _FILE_SUFFIXES
    return not looks_like_path and not path.exists()


def read_rows(source: str | Path | None, split: str) -> list[Row]:
    """Return the rows of a source, such as that of `--data.train`, for the `load` of a task file; see `read`."""
    if source is None:
        flag = f" with {_FLAGS[split]}" if split in _FLAGS else ""
        raise UserError(f"no {split} rows are given; pass a file or a Hub dataset{flag}")
    return [record.columns for record in read(str(source), split)]


def read(
    source: str,
    split: str,
    required: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
    hub_config: str | None = None,
) -> list[Record]:
    """Return the records of a file or Hub dataset.

    Args:
        source: path of a JSON Lines, CSV or Parquet file, or a Hub dataset as `owner/name:config@split`. The config and
            the split may be left out.
        split: "train", "eval" (the Hub's "test" split), or the Hub's name of a split. All rows of a file are in either.
        required: columns that every record must have.
        columns: {our name: the source's name} for columns with another name in the source.
        hub_config: the config of a Hub dataset whose source names none.

    Raises:
        UserError: the source cannot be read, has no rows, or lacks a column.
    """
    path = Path(source).expanduser()
    suffix = Path(source.lower().removesuffix(".gz")).suffix
    if python_objects.is_name(source):
        records = _read_object(source)
    elif is_on_hub(source):
        records = _read_hub(source, split, hub_config)
    elif suffix == ".parquet":
        records = _read_parquet(path)
    elif suffix == ".csv":
        records = _read_csv(path)
    else:
        records = _read_json_lines(path)
    if not records:
        raise UserError(f"{source} has no rows for {split!r}; pass a file or dataset with at least one")
    return [_renamed(record, required, columns or {}) for record in records]


def _read_json_lines(path: Path) -> list[Record]:
    records = []
    for where, value in json_files.read_lines(path, "a JSON Lines file"):
        if not isinstance(value, dict):
            raise UserError(f"{where}: got {type(value).__name__}; expected an object with columns")
        records.append(Record(where, value))
    return records


def _read_csv(path: Path) -> list[Record]:
    """Return each row of a CSV file with a header.

    All values are strings, because a reader that guesses types would read the answer "007" as 7. A column without a
    name, such as the index that pandas writes, is dropped.
    """
    text = json_files.read_text(path, "a CSV file with a header")
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    records = []
    try:
        header = reader.fieldnames or ()
        for separator, name in ((";", "semicolons"), ("\t", "tabs")):  # as spreadsheets write in some countries
            if len(header) == 1 and separator in header[0]:
                raise UserError(f"{path}:1: {name} separate the columns; save the file with commas in their place")
        # A row would have the last of two columns with the same name only.
        for name, count in Counter(name.strip() for name in header).items():
            if name and count > 1:
                raise UserError(f"{path}:1: the header has {name!r} {count} times; rename the others")

        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if None in cells or None in cells.values():  # surplus cells have the name None, missing ones are None
                raise UserError(
                    f"{where}: more or fewer cells than the {len(header)} names in the header; put "
                    "texts that contain commas in double quotes"
                )
            columns = {name.strip(): cell for name, cell in cells.items() if name.strip()}
            records.append(Record(where, columns))
    except csv.Error as error:
        raise UserError(
            f'{path}:{reader.reader.line_num}: {error}; expected CSV, with " in a text written as ""'
        ) from None
    return records


def _read_object(name: str) -> list[Record]:
    """Return the rows of a list of dictionaries, or of a `datasets.Dataset`, that Python code has given."""
    rows = python_objects.find(name)
    if hasattr(rows, "to_list"):
        rows = rows.to_list()
    records = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{name}: row {index} is {row!r:.60}; expected a dictionary")
        records.append(_with_json_values(dict(row), f"{name} row {index}"))
    return records


def _read_parquet(path: Path) -> list[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is not a readable Parquet file: {first_line(error)}") from None
    return [_with_json_values(row, f"{path} row {index}") for index, row in enumerate(rows)]


def _read_hub(source: str, split: str, hub_config: str | None) -> list[Record]:
    dataset_and_config, _, named_split = source.partition("@")
    dataset, _, config = dataset_and_config.partition(":")
    flag = _FLAGS.get(split, _FLAGS["eval"])
    if named_split:
        hub_split = named_split
    elif split == "eval":
        hub_split = "test"
    else:
        hub_split = split

    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)  # two lines for each of many retries
    try:
        import datasets

        rows = datasets.load_dataset(dataset, config or hub_config, split=hub_split)
    except Exception as error:
        # Offline, missing and gated datasets raise many types. ValueError names the existing configs or splits first.
        reason = " ".join(str(error).split("Example of usage")[0].split())
        raise UserError(
            f"cannot load split {hub_split!r} of {source!r} from the Hub ({reason:.300}); pass {dataset}:CONFIG@SPLIT, "
            f"or a JSON Lines, CSV or Parquet file, with {flag}"
        ) from error
    return [_with_json_values(row, f"{source} ({hub_split}) row {index}") for index, row in enumerate(rows)]


def _renamed(record: Record, required: Sequence[str], columns: Mapping[str, str]) -> Record:
    """Return a record with our column names beside those of the source.

    Raises:
        UserError: a column is missing, or the source has another column with our name.
    """
    for name in dict.fromkeys([*required, *columns]):
        source_name = columns.get(name, name)
        if source_name not in record.columns:
            present = ", ".join(f"{column[:40]!r}" for column in list(record.columns)[:12])
            raise UserError(
                f"{record.where}: {source_name!r} is missing; the columns are {present or 'none'}; "
                f"name yours with --data.columns {name}=COLUMN, or add a header line if these are values"
            )
    renamed = {name: record.columns[source_name] for name, source_name in columns.items()}
    other_columns = dict(record.columns)
    for source_name in columns.values():
        if source_name in REWARD_ARGUMENTS:  # it was renamed because a column cannot have this name
            other_columns.pop(source_name, None)
    for name, value in renamed.items():
        if name not in columns.values() and other_columns.get(name, value) != value:
            raise UserError(
                f"{record.where}: --data.columns {name}={columns[name]} would replace a column {name!r} with another "
                "value; rename or remove one of the two"
            )
    return Record(record.where, {**other_columns, **renamed})


def _with_json_values(columns: Mapping[str, Any], where: str) -> Record:
    """Return a record with the values that JSON has, as rows are written as JSON.

    Dates, times and decimal numbers become text. Bytes are text in UTF-8, as some programs write text to Parquet files.

    Raises:
        UserError: a column has other values, such as an image or bytes that are not text.
    """
    for name, value in columns.items():
        try:
            json.dumps(value, default=_json_value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{where}: the column {name!r} is not text or numbers ({first_line(error)}); remove it"
            ) from None
    return Record(where, json.loads(json.dumps(columns, default=_json_value)))


def _json_value(value: Any) -> Any:
    """Return a value of a Parquet file or a dataset as one that JSON has, or raise TypeError or ValueError."""
    if isinstance(value, (bytes, bytearray)):
        return value.decode()
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)):
        return str(value)
    if hasattr(value, "tolist"):  # a number or an array of NumPy
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not text")


def texts(columns: Mapping[str, Any], names: Sequence[str], where: str) -> list[str]:
    """Return the values of these columns, or raise UserError unless all of them are non-empty strings."""
    values = []
    for name in names:
        value = columns.get(name)
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{where}: {name!r} is {value!r:.60}; expected a non-empty string")
        values.append(value)
    return values


def check_python(text: str, name: str, where: str) -> ast.Module:
    """Parse the code in a column, or raise UserError if it is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MBPP has invalid escape sequences in strings.
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        problem = str(error)
        if isinstance(error, SyntaxError):
            problem = f"line {error.lineno}: {error.msg}"
        raise UserError(f"{where}: {name!r} is not Python ({problem}); fix the row or remove it") from None


def unique(rows: list[Row], where: str) -> list[Row]:
    """Return rows, or raise UserError if two share an id. Ids are texts: 1 and "1" are the same."""
    row_id, count = Counter(row["id"] for row in rows).most_common(1)[0]
    if count > 1:
        raise UserError(f"{where}: {count} rows have the id {row_id!r}; keep one of them, or leave out the ids")
    return rows
