"""Python files of users: import them once, with the modules in their folder, and locate the line of an exception."""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import atomic


def load(path: Path, expected: str) -> ModuleType:
    """Run a user's file, once per process. It may import modules of its folder.

    Raises UserError if the file, which is `expected` to be, for example, "a task file", cannot be read or run.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected {expected}")
    return _load(path)


def forget() -> None:
    """Forget the files that were run, and the modules of their folders, so that the next call reads them again."""
    for name in list(sys.modules):
        if name in _loaded_modules or name.partition(".")[0] in _loaded_modules:
            del sys.modules[name]
    _loaded_modules.clear()
    for folder in _added_folders:
        if folder in sys.path:
            sys.path.remove(folder)
    _added_folders.clear()
    _load.cache_clear()


_loaded_modules: set[str] = set()
"""Names in `sys.modules` of the files and of the modules of their folders."""
_added_folders: list[str] = []
"""Folders that were added to `sys.path`."""


@functools.cache
def _load(path: Path) -> ModuleType:
    name = f"user_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that nothing in this folder replaces an installed package
        _added_folders.append(str(path.parent))
    for helper in sorted({file.relative_to(path.parent).parts[0].removesuffix(".py") for file in files(path)[1:]}):
        other = importlib.util.find_spec(helper)
        if helper not in sys.modules:
            _loaded_modules.add(helper)
        own = {(path.parent / each).resolve() for each in (f"{helper}.py", f"{helper}/__init__.py")}
        if other is None or other.origin is None or Path(other.origin).resolve() not in own:
            origin = other and other.origin
            raise UserError(f"{path} imports {helper!r}, which would be {origin} instead of its own; rename the file")
    sys.modules[name] = module  # required by dataclasses and pickle
    _loaded_modules.add(name)
    try:
        with keeping_directory():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        message = f"importing this file raised {type(error).__name__}: {first_line(error)}"
        raise UserError(f"{line_of(error, path)}: {message}") from error
    return module


def files(path: Path) -> list[Path]:
    """Return a file and the files of its folder that it imports, directly or indirectly. Runs nothing."""
    found = [path.expanduser().resolve()]
    for file in found:  # the list grows meanwhile
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # importing it reports the error
            continue
        imported: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.append(str(node.module))
        for name in sorted({name.partition(".")[0] for name in imported} - {"lora_grpo"}):
            package, module = found[0].parent / name, found[0].parent / f"{name}.py"
            helpers = sorted(package.rglob("*.py")) if (package / "__init__.py").is_file() else [module]
            found += [helper for helper in helpers if helper.is_file() and helper not in found]
    return found


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file or, if it imports files of its folder, of the digests of all of them."""
    digests = [atomic.sha256(file) for file in files(path)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def keeping_directory() -> contextlib.AbstractContextManager[None]:
    """Undo a change of the current directory in a `with` block, so that relative paths remain valid."""
    return contextlib.chdir(Path.cwd())


def line_of(error: BaseException, path: Path) -> str:
    """Return "file:line" of the last line of a file that an exception passed through, or only the file."""
    path = path.expanduser().resolve()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
