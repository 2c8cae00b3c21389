"""Python files of users: import them once, with the modules in their folder, and locate the line of an exception."""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import atomic

_loaded_modules: set[str] = set()
"""Names in `sys.modules` of the files and of the modules of their folders."""
_added_folders: list[str] = []
"""Folders that were added to `sys.path`."""

# Import


def load(path: Path, expected: str) -> ModuleType:
    """Run a user's file, once per process, and return its module. It may import modules of its folder.

    Args:
        path: the file.
        expected: what the file should be, for the error: "a task file".

    Raises:
        UserError: the file does not exist or raises an exception, or a module of its folder has the name of another.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected {expected}")
    return _load(path)


@functools.cache
def _load(path: Path) -> ModuleType:
    # Its folder goes last, so that nothing in the folder replaces an installed package.
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
        _added_folders.append(folder)
    for name in _imported_names(path):
        if name not in sys.modules:
            _loaded_modules.add(name)
        _check_is_in_folder(name, path)

    module_name = f"user_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # required by dataclasses and pickle
    _loaded_modules.add(module_name)
    try:
        with keeping_directory():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        message = f"importing this file raised {type(error).__name__}: {first_line(error)}"
        if isinstance(error, ModuleNotFoundError):  # often it is installed for another Python
            message += f"; install it for {sys.executable}"
        raise UserError(f"{line_of(error, path)}: {message}") from error
    return module


def _imported_names(path: Path) -> list[str]:
    """Return the names of the modules and packages of a file's folder that it imports, directly or indirectly."""
    names = set()
    _, *imported_files = files(path)
    for file in imported_files:
        top_level = file.relative_to(path.parent).parts[0]
        names.add(top_level.removesuffix(".py"))
    return sorted(names)


def _check_is_in_folder(name: str, path: Path) -> None:
    """Raise a UserError if importing `name` would not give the module or package beside the user's file."""
    spec = importlib.util.find_spec(name)
    origin = spec.origin if spec else None
    module = (path.parent / f"{name}.py").resolve()
    package = (path.parent / name / "__init__.py").resolve()
    if origin is None or Path(origin).resolve() not in (module, package):
        raise UserError(f"{path} imports {name!r}, which would be {origin} instead of its own; rename the file")


def forget() -> None:
    """Forget the files that were run, and the modules of their folders, so that the next call reads them again."""
    for name in list(sys.modules):
        package = name.partition(".")[0]
        if name in _loaded_modules or package in _loaded_modules:
            del sys.modules[name]
    _loaded_modules.clear()
    for folder in _added_folders:
        if folder in sys.path:
            sys.path.remove(folder)
    _added_folders.clear()
    _load.cache_clear()


def keeping_directory() -> contextlib.AbstractContextManager[None]:
    """Undo a change of the current directory in a `with` block, so that relative paths remain valid."""
    return contextlib.chdir(Path.cwd())


# What belongs to a file


def files(path: Path) -> list[Path]:
    """Return a file, and then the files of its folder that it imports, directly or indirectly. Runs nothing."""
    path = path.expanduser().resolve()
    project_files = [path]
    for file in project_files:  # the list grows meanwhile
        for name in _imports(file):
            for helper in _files_of_module(path.parent, name):
                if helper not in project_files:
                    project_files.append(helper)
    return project_files


def _imports(file: Path) -> list[str]:
    """Return the top-level names of a file's absolute imports, sorted."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # importing it reports the error
        return []
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.append(str(node.module))
    names = {module.partition(".")[0] for module in modules}
    return sorted(names - {"lora_grpo"})


def _files_of_module(folder: Path, name: str) -> list[Path]:
    """Return the files of a package or module in a folder; [] if it has none of this name."""
    if (folder / name / "__init__.py").is_file():
        return [file for file in sorted((folder / name).rglob("*.py")) if file.is_file()]
    module = folder / f"{name}.py"
    return [module] if module.is_file() else []


def sha256(project_files: Iterable[Path]) -> str:
    """Return the SHA-256 of a file or, if there are several, of the digests of all of them."""
    digests = [atomic.sha256(file) for file in project_files]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def line_of(error: BaseException, path: Path) -> str:
    """Return "file:line" of the last line of a file that an exception passed through, or only the file."""
    path = path.expanduser().resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
