"""Rewards from a user's Python file. The file is checked without running it and is imported only when needed."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from lora_grpo.errors import UserError, first_line, suggestion
from lora_grpo.rewards.functions import RewardFunction


def check_file(path: Path, function: str) -> None:
    """Check that a file defines, assigns or imports a reward function at its top level, without running the file.

    Raises:
        UserError: the file or function is missing, the file is not Python, or the trainer could not call the function.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a Python file that defines {function!r}") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} is not Python: {first_line(error)}") from None
    defined: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            defined.append(node.name)
            if node.name == function and node.args.kwarg is None:
                raise UserError(f"{path}:{node.lineno}: {function!r} must take **columns; the trainer passes them all")
        elif isinstance(node, ast.Assign):
            defined += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined += [alias.asname or alias.name for alias in node.names]
    if function not in defined:
        hint = suggestion(function, defined, otherwise=f"it defines {', '.join(defined) or 'nothing'}")
        raise UserError(f"{path} does not define {function!r}; {hint}")


def load_file(path: Path, function: str) -> RewardFunction:
    """Return a function from a user's file. A file runs only once, even if it defines several rewards.

    Raises:
        UserError: the file raises an error on import, or the name is not a function.
    """
    reward = getattr(_import_file(path.resolve()), function)
    if not callable(reward):
        raise UserError(f"{path}: {function!r} is {reward!r:.60}; expected a function (completions, **columns)")
    return reward


@functools.cache
def _import_file(path: Path) -> ModuleType:
    name = f"reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Required by dataclasses and pickle.
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}:{lines[-1]}" if lines else str(path)
        raise UserError(f"{where}: importing this file raised {type(error).__name__}: {first_line(error)}") from error
    return module
