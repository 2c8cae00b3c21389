"""Imports optional packages and starts engines, with one-line errors for everything that can go wrong."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from lora_grpo.errors import EngineFailed, ModelError, RunError, UserError, first_line

_LONGEST_REASON = 300


def require(name: str, *, extra: str, feature: str, otherwise: str) -> ModuleType:
    """Import a package that an extra of this project installs, or raise UserError.

    Args:
        feature: what needs the package.
        otherwise: what the user can do without it, such as "pass --model.engine peft".
    """
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{feature} needs {package}; run `pip install 'lora-grpo[{extra}]'`, or {otherwise}")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a broken installation raises any type
        raise UserError(
            f"{feature} needs {name}, which cannot be imported here ({reason(error)}); install it again, or {otherwise}"
        ) from error


def require_compiler(*, feature: str, otherwise: str) -> None:
    """Check for what Triton (3.7) needs to run a kernel on a GPU, or raise UserError.

    It compiles a small C extension, which fails in the first training step or deep inside vLLM. Arguments as above.
    """
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does, for Debian
    missing = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("a C compiler")
    if not Path(sysconfig.get_paths(scheme)["include"], "Python.h").is_file():
        missing.append("Python's C headers")
    if missing:
        raise UserError(
            f"{feature} needs {' and '.join(missing)} to compile GPU kernels (Ubuntu: `sudo apt install gcc "
            f"python3-dev`); install them, or {otherwise}"
        )


@contextlib.contextmanager
def starting(engine: str, *, is_auto: bool, instead: tuple[str, ...]) -> Iterator[None]:
    """Turn every error in a `with` block that imports or starts an engine into a one-line error.

    Args:
        is_auto: whether `auto` chose the engine. If so, every error except a ModelError becomes an EngineFailed.
        instead: the arguments that select another engine.
    """
    try:
        yield
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        is_ours = isinstance(error, (UserError, RunError))
        problem = str(error).rpartition("; ")[0] if is_ours else f"{engine} does not start ({reason(error)})"
        if is_auto:
            raise EngineFailed(problem or str(error), instead) from error
        if is_ours:
            raise
        raise RunError(f"{problem}; pass {' '.join(instead)}") from error


def reason(error: BaseException) -> str:
    """Return the type and the first line of the error that caused this one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"[:_LONGEST_REASON]
