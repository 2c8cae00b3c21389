"""Read CSV and Parquet files of users: one dictionary for each row."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import json_files


def read_csv(path: Path) -> list[tuple[str, dict[str, str]]]:
    """Return ("file:line", row) for each row of a CSV file with a header, which is gzipped if its name ends in `.gz`.

    All values are strings, because a reader that guesses types would read the answer "007" as 7. A column without a
    name, such as the index that pandas writes, is dropped.

    Raises:
        UserError: the file cannot be read, has no rows, or a row has more or fewer cells than the header.
    """
    text = json_files.read_text(path, "a CSV file with a header")
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        for cells in reader:  # DictReader puts surplus cells under None, and None into missing ones
            where = f"{path}:{reader.line_num}"
            if None in cells or None in cells.values():
                raise UserError(
                    f"{where}: more or fewer cells than the {len(reader.fieldnames or ())} names in the header; put "
                    "texts that contain commas in double quotes"
                )
            rows.append((where, {name.strip(): cell for name, cell in cells.items() if name.strip()}))
    except csv.Error as error:
        raise UserError(f'{path}:{reader.line_num}: {error}; expected CSV, with " in a text written as ""') from None
    if not rows:
        raise UserError(f"{path}: no rows; expected a header and at least one row")
    return rows


def read_parquet(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return ("file row N", row) for each row of a Parquet file, counted from 0.

    Raises:
        UserError: the file cannot be read, is not a Parquet file, or has no rows.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is not a readable Parquet file: {first_line(error)}") from None
    if not rows:
        raise UserError(f"{path}: no rows; expected a Parquet file with at least one row")
    return [(f"{path} row {index}", row) for index, row in enumerate(rows)]
