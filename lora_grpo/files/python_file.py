"""Python files of users: import them once, with the modules beside them, and name the line that raised an exception."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.abc
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import atomic


class _Helpers(importlib.abc.MetaPathFinder):
    """Finds the modules beside users' files, by the names that the files import, and nothing else in those folders."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.paths[name]) if name in self.paths else None


_helpers = _Helpers()


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


def files(path: Path) -> list[Path]:
    """Return a file and the files beside it that it imports, directly or through each other. Runs nothing."""
    path = path.expanduser().resolve()
    return [path, *(file for helper in _find_helpers(path).values() for file in _of_module(helper) if file != path)]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file or, if it imports files beside it, of the digests of all of them."""
    digests = [atomic.sha256(file) for file in files(path)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _find_helpers(path: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    waiting = [path]
    while waiting:
        try:
            tree = ast.parse(waiting.pop().read_bytes())
        except (SyntaxError, ValueError):  # importing it says so
            continue
        for name in sorted({name.partition(".")[0] for node in ast.walk(tree) for name in _imported(node)}):
            places = (path.parent / name / "__init__.py", path.parent / f"{name}.py")
            helper = next((place for place in places if place.is_file()), None)
            if helper and name != "lora_grpo" and name not in found:
                found[name] = helper
                waiting += _of_module(helper)
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def _of_module(helper: Path) -> list[Path]:
    return sorted(helper.parent.rglob("*.py")) if helper.name == "__init__.py" else [helper]


def _add_helpers(path: Path) -> None:
    """Make the modules beside a file importable, after everything that is installed."""
    for name, helper in _find_helpers(path).items():
        other = importlib.util.find_spec(name)
        if other is None:
            _helpers.paths[name] = helper
        elif other.origin is None or Path(other.origin).resolve() != helper:
            raise UserError(
                f"{path} imports {name!r}, which is {helper} or {other.origin or 'another module'}; rename the file"
            )
    if _helpers not in sys.meta_path:
        sys.meta_path.append(_helpers)


@functools.cache
def _load(path: Path) -> ModuleType:
    name = f"user_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    _add_helpers(path)
    sys.modules[name] = module  # Required by dataclasses and pickle.
    try:
        with keeping_directory():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        message = f"importing this file raised {type(error).__name__}: {first_line(error)}"
        raise UserError(f"{line_of(error, path)}: {message}") from error
    return module


@contextlib.contextmanager
def keeping_directory() -> Iterator[None]:
    """Undo a change of the current directory in the block, so that relative paths keep their meaning."""
    directory = os.open(".", os.O_RDONLY)
    try:
        yield
    finally:
        os.fchdir(directory)
        os.close(directory)


def line_of(error: BaseException, path: Path) -> str:
    """Return "file:line" of the last line of a file that an exception passed through, or only the file."""
    path = path.expanduser().resolve()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
