"""Python files of users: import them once, and name the line that raised an exception."""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from lora_grpo.errors import UserError, first_line


def load(path: Path, expected: str) -> ModuleType:
    """Run a user's file, once per process.

    Args:
        expected: what the file is, for the error message.

    Raises:
        UserError: the file cannot be read, is not Python, or raises an exception.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected {expected}")
    return _load(path)


@functools.cache
def _load(path: Path) -> ModuleType:
    name = f"user_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Required by dataclasses and pickle.
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        message = f"importing this file raised {type(error).__name__}: {first_line(error)}"
        raise UserError(f"{line_of(error, path)}: {message}") from error
    return module


def line_of(error: BaseException, path: Path) -> str:
    """Return "file:line" of the last line of a file that an exception passed through, or only the file."""
    path = path.expanduser().resolve()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
