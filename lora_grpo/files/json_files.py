"""Read and write JSON objects and JSON Lines files.

User files may be gzipped. Files of an interrupted run may be truncated. Only "\\n" ends a line: a JSON string may
contain U+2028, where str.splitlines() would split.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import disk


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


def validated(value: Any, kind: Any, wrong: str, fix: str) -> Any:
    """Return a JSON value as a pydantic model or dataclass of strict types, or raise UserError with the first mistake.

    Args:
        kind: the type.
        wrong: the problem if the value is not of this type: "run.json is damaged".
        fix: how to solve it.
    """
    from pydantic import TypeAdapter, ValidationError

    # Validated as JSON, because strict mode accepts a list for a tuple there, but not in Python. A text may contain a
    # lone surrogate, which UTF-8 cannot encode.
    json_text = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    try:
        return TypeAdapter(kind).validate_json(json_text, strict=True)
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        location = ".".join(map(str, mistake["loc"]))
        raise UserError(f"{wrong}: {location}: {mistake['msg']}; {fix}") from None


def read_lines(path: Path, expected: str) -> Iterator[tuple[str, Any]]:
    """Yield ("file:line", value) for each non-blank line of a file, which is gzipped if its name ends in `.gz`.

    `expected` describes the file in error messages: "a JSON Lines file with 'question' and 'answer'".

    Raises:
        UserError: the file cannot be read, has no lines, or a line is not JSON.
    """
    text = read_text(path, expected)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            location = f"{path}:{number}"
            yield location, _parse_line(line, location)


def _parse_line(line: str, location: str) -> Any:
    """Return the JSON value of a user's line, or raise a UserError with its location."""
    try:
        return json.loads(line, object_pairs_hook=_object_without_repeats)
    except _RepeatedKeyError as error:
        raise UserError(f"{location}: the key {error.key!r:.60} occurs twice; rename one of them") from None
    except (ValueError, RecursionError) as error:
        details = ""
        if isinstance(error, json.JSONDecodeError):
            details = f" (column {error.colno}: {error.msg})"
        raise UserError(f"{location}: not JSON; expected one object per line, got {line[:60]!r}{details}") from None


class _RepeatedKeyError(Exception):
    """A JSON object has a key twice."""

    def __init__(self, key: str) -> None:
        self.key = key


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Python would silently take the last value of a key that occurs twice."""
    json_object: dict[str, Any] = {}
    for key, value in pairs:
        if key in json_object:
            raise _RepeatedKeyError(key)
        json_object[key] = value
    return json_object


def read_text(path: Path, expected: str) -> str:
    """Return the text of a user's file, which is decompressed if its name ends in `.gz`.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or contains only whitespace.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: byte {data[error.start]:#x} is not UTF-8; save {expected} as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {reason}; expected {expected}") from None
    if not text.strip():
        raise UserError(f"{path}: no rows; expected {expected}")
    return text


def read_finished_lines(path: Path, **required: type | tuple[type, ...]) -> list[dict[str, Any]]:
    """Return the objects in a JSON Lines file that may still be growing; [] if there is no file.

    Args:
        path: the file. A last line without a newline is incomplete and skipped.
        required: keys that every object must have, with the types of their values.

    Raises:
        UserError: a line is not such an object. The error names the line.
    """
    if not path.is_file():
        return []
    objects = []
    finished_lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(finished_lines, start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not _has_keys(value, required):
            keys = f" with {', '.join(required)}" if required else ""
            raise UserError(f"{path}:{number}: expected an object{keys}, got {line[:60]!r}; delete the line")
        objects.append(value)
    return objects


def _has_keys(value: Any, required: Mapping[str, type | tuple[type, ...]]) -> bool:
    """Return whether a JSON value is an object with these keys, and values of these types."""
    if not isinstance(value, dict):
        return False
    return all(isinstance(value.get(key), kind) for key, kind in required.items())


def dump_lines(values: Iterable[Any]) -> str:
    """Return values as the text of a JSON Lines file, in ASCII."""
    # A model's text may contain a lone surrogate, which UTF-8 cannot encode.
    return "".join(json.dumps(value) + "\n" for value in values)


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append values to a file and flush them to disk. If the disk is full, the file is unchanged."""
    data = dump_lines(values).encode()
    # Unbuffered, because closing a buffered file would write the rest after the file was truncated.
    with disk.writing(path), path.open("ab", buffering=0) as file:
        original_size = file.tell()
        try:
            while data:  # a write may be short
                num_written = file.write(data)
                data = data[num_written:]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(original_size)
            raise


def stem(path: Path) -> str:
    """Return the file name without its suffixes: `HumanEval` for `HumanEval.jsonl.gz`."""
    return Path(path.name.removesuffix(".gz")).stem
