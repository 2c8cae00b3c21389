"""Read and write JSON objects and JSON Lines files.

User files may be gzipped. Files of an interrupted run may be truncated. Only "\\n" ends a line: a JSON string may
contain U+2028, where str.splitlines() would split.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
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

    # As JSON, where strict mode accepts a list as a tuple. Error messages may contain a lone surrogate.
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{wrong}: {'.'.join(map(str, first['loc']))}: {first['msg']}; {fix}") from None


def read_lines(path: Path, expected: str) -> Iterator[tuple[str, Any]]:
    """Yield ("file:line", value) for each non-blank line of a file, which is gzipped if its name ends in `.gz`.

    `expected` describes the file in error messages: "a JSON Lines file with 'question' and 'answer'".

    Raises:
        UserError: the file cannot be read, has no lines, or a line is not JSON.
    """
    text = read_text(path, expected)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line, object_pairs_hook=_without_repeats)
            except _RepeatedKey as error:
                raise UserError(
                    f"{path}:{number}: the key {error.key!r:.60} occurs twice; rename one of them"
                ) from None
            except (ValueError, RecursionError) as error:
                where = ""
                if isinstance(error, json.JSONDecodeError):
                    where = f" (column {error.colno}: {error.msg})"
                raise UserError(
                    f"{path}:{number}: not JSON; expected one object per line, got {line[:60]!r}{where}"
                ) from None


class _RepeatedKey(Exception):
    """A JSON object has a key twice."""

    def __init__(self, key: str) -> None:
        self.key = key


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Python would silently take the last value of a key that occurs twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedKey(key)
        found[key] = value
    return found


def read_text(path: Path, expected: str) -> str:
    """Return the text of a user's file, which is decompressed if its name ends in `.gz`.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or contains only whitespace.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
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

    A last line without a newline is incomplete and skipped. Every other line must be an object with the `required`
    keys, with values of these types, else UserError names the line.
    """
    values: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.is_file() else (), start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not all(isinstance(value.get(name), kind) for name, kind in required.items()):
            keys = f" with {', '.join(required)}" if required else ""
            raise UserError(f"{path}:{number}: expected an object{keys}, got {line[:60]!r}; delete the line")
        values.append(value)
    return values


def dump_lines(values: Iterable[Any]) -> str:
    # ASCII, because a model's text may contain a lone surrogate, which UTF-8 cannot encode.
    return "".join(json.dumps(value) + "\n" for value in values)


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append values to a file and flush them to disk. If the disk is full, the file is unchanged."""
    data = dump_lines(values).encode()
    # Unbuffered, because closing a buffered file would write the rest after the file was truncated.
    with disk.writing(path), path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def stem(path: Path) -> str:
    """Return the file name without its suffixes: `HumanEval` for `HumanEval.jsonl.gz`."""
    return Path(path.name.removesuffix(".gz")).stem
