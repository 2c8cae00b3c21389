"""JSON-lines files: a user's, plain or gzipped, its mistakes told by line; and the kit's own, appended as work goes on.

Lines end in "\\n" alone: JSON strings may hold U+2028, which str.splitlines() takes for an end as well.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from lora_grpo.errors import UserError


def read(path: Path, expected: str) -> Iterator[tuple[str, Any]]:
    """Yield each line's value with where it stands, "file:line"; blank lines are passed over.

    Args:
        path: the file; one whose name ends in `.gz` is unpacked.
        expected: what it should be, for messages: "a JSON-lines file with 'question' and 'answer'".

    Raises:
        UserError: the file is missing, a directory or unreadable, holds no line, or a line is not JSON.
    """
    count = 0
    for number, line in enumerate(_text(path, expected).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path}:{number}: not JSON; expected one object a line, got {line[:60]!r}") from None
        count += 1
        yield f"{path}:{number}", value
    if not count:
        raise UserError(f"{path}: no rows; expected {expected}")


def read_finished(path: Path) -> list[Any]:
    """Return the values of a file that a killed process may have left, up to the first line without an end."""
    values: list[Any] = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        try:
            values.append(json.loads(line))
        except ValueError:
            break
    return values


def cut(path: Path, count: int) -> None:
    """Cut a file off after its first `count` lines, if it exists."""
    if not path.exists():
        return
    data, end = path.read_bytes(), 0
    for _ in range(count):
        end = data.index(b"\n", end) + 1
    if end < len(data):
        os.truncate(path, end)


def dump(values: Iterable[Any]) -> str:
    """Return values as text, a line each."""
    # ASCII: a model's text may hold half of a surrogate pair, which UTF-8 has no bytes for.
    return "".join(json.dumps(value) + "\n" for value in values)


def append(file: IO[str], values: Iterable[Any]) -> None:
    """Write values at the file's end, a line each, and flush them to disk."""
    file.write(dump(values))
    file.flush()
    os.fsync(file.fileno())


def stem(path: Path) -> str:
    """Return the file's name without `.gz` and the suffix before it: `HumanEval.jsonl.gz` is `HumanEval`."""
    return Path(path.name.removesuffix(".gz")).stem


def _text(path: Path, expected: str) -> str:
    if path.is_dir():
        raise UserError(f"{path} is a directory; expected {expected}")
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {expected}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8 JSON lines") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UserError(f"{path}: not a whole gzip file; unpack it, or fetch it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file and its permissions") from None
