"""Rewards from a user's own Python file: checked without running it, imported when the run needs them."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from lora_grpo.errors import UserError
from lora_grpo.rewards.functions import RewardFunction
from lora_grpo.rewards.guard import one_line


def check_file(path: Path, function: str) -> None:
    """Refuse a file that does not define the function at its top level; the file is read, not run.

    Args:
        path: the Python file.
        function: a name that the file defines, assigns or imports.

    Raises:
        UserError: no such file or function, no Python, or a function that the trainer could not call.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a Python file that defines {function!r}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: {error.msg}; the file of reward {function!r} is not Python") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; the file of reward {function!r} is not Python") from None
    defined: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name == function:
            raise UserError(f"{path}:{node.lineno}: {function!r} is async; make it a plain function")
        if isinstance(node, ast.FunctionDef):
            if node.name == function and node.args.kwarg is None:
                raise UserError(
                    f"{path}:{node.lineno}: {function!r} must end in **columns; the trainer passes them all"
                )
            defined.append(node.name)
        elif isinstance(node, ast.Assign):
            defined += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined += [alias.asname or alias.name for alias in node.names]
    if function not in defined:
        near = difflib.get_close_matches(function, defined, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it defines {', '.join(defined) or 'nothing'}"
        raise UserError(f"{path} does not define {function!r}; {hint}")


def load_file(path: Path, function: str, modules: dict[Path, ModuleType]) -> RewardFunction:
    """Return a function of a user's file.

    Args:
        path: the Python file.
        function: the name of the function.
        modules: the files run so far; each is run once, however many rewards it holds.

    Raises:
        UserError: the file raises as it is imported (the message gives file and line), or the name is no function.
    """
    key = path.resolve()
    if key not in modules:
        modules[key] = _import_file(path)
    reward = getattr(modules[key], function, None)
    if not callable(reward):
        raise UserError(f"{path}: {function!r} is {reward!r:.60}; expected a function (completions, **columns)")
    return reward


def _import_file(path: Path) -> ModuleType:
    name = f"reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses and pickle look their own module up.
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.resolve())
        ]
        where = f"{path}:{lines[-1]}" if lines else str(path)
        raise UserError(f"{where}: importing this file of rewards raised {one_line(error)}") from error
    return module
