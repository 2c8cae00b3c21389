"""Note every deprecated use of a library by this package, in every Python process of a test run.

`tools/newest.py` lets each Python of an environment import this module. It does nothing without DEPRECATIONS_FILE.

A library tells of a deprecation with `warnings.warn` or, as transformers, TRL and vLLM also do, with a warning of its
logger. Filters and levels hide many of both, and `stacklevel` often names another place than the call. So both
functions are wrapped, and the stack tells who called: the first frame outside the library that warns. It is ours if its
file is in one of OURS. What C code warns of, such as NumPy's and Python's own, does not pass through these functions,
but names the calling module correctly: `tools/newest.py` makes it an error with a filter of pytest.
"""

import functools
import json
import logging
import os
import re
import sys
import threading
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("lora_grpo", "recipes", "scripts")  # not the tests, which also call TRL as its users do
DEPRECATED = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
# What a logger says of a deprecation; its warnings have no category.
SAYS_SO = re.compile(r"deprecat|will be removed|(will|is going to) be (dropped|unsupported)", re.IGNORECASE)
# They pass a warning on, and are not the library that warns.
DECORATORS = {"typing_extensions", "warnings", "_py_warnings"}
"""Of these modules, the function `wrapper` of `deprecated` stands for the library that warns."""
PASSES_ON = {
    *("warnings", "_py_warnings", "logging", "functools", "contextlib", "importlib", "typing_extensions"),
    __name__,
}
# Functions that pass the arguments of their caller on: PyTorch's and PEFT's to a model's `forward`, and constructors to
# that of their base class.
PASS_ARGUMENTS = {"__call__", "_call_impl", "_wrapped_call_impl", "forward", "__init__", "__post_init__"}
_noting = threading.local()


def caller() -> tuple[str, str] | None:
    """Return the library that warns and the line of this package that called it, or None if another library did."""
    frame = sys._getframe(1)
    library = None
    functions: list[str] = []  # of the library
    is_decorated = False
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        function = frame.f_code.co_name
        path = Path(frame.f_code.co_filename)
        if package == "importlib" and functions != ["<module>"]:
            return None  # what a library does while it is imported, unless the module itself is deprecated
        is_decorated = is_decorated or (package in DECORATORS and function == "wrapper")
        if package not in PASSES_ON:
            if any(path.is_relative_to(ROOT / folder) for folder in OURS):
                return library or "a decorator", f"{path.relative_to(ROOT)}:{frame.f_lineno}"
            if library is None and is_decorated:
                return None  # another library calls what is decorated
            library = library or package
            if package == library:
                functions.append(function)
            elif function not in PASS_ARGUMENTS:
                return None  # one library calls another one
        frame = frame.f_back
    return None


def note(kind: str, text: str) -> None:
    """Append a deprecated call of ours to the file."""
    if getattr(_noting, "now", False):
        return
    _noting.now = True
    try:
        found = caller()
        if found is None:
            return
        library, place = found
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        line = {"library": library, "place": place, "kind": kind, "text": " ".join(text.split()), "test": test}
        with Path(os.environ["DEPRECATIONS_FILE"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    finally:
        _noting.now = False


def watch() -> None:
    """Wrap `warnings.warn` and the methods of loggers with which libraries warn."""
    warn = warnings.warn
    warning = logging.Logger.warning
    log = logging.Logger.log

    @functools.wraps(warn)
    def noting_warn(message, category=None, stacklevel=1, *args, **options):
        kind = type(message) if isinstance(message, Warning) else category or UserWarning
        if issubclass(kind, DEPRECATED):
            note(kind.__name__, str(message))
        return warn(message, category, stacklevel + 1, *args, **options)

    def note_if_it_says_so(logger, *words):
        text = " ".join(str(word) for word in words)
        if SAYS_SO.search(text):
            note(f"logger {logger.name}", text)

    @functools.wraps(warning)
    def noting_warning(logger, message, *args, **options):
        note_if_it_says_so(logger, message, *args)
        options["stacklevel"] = options.get("stacklevel", 1) + 1
        return warning(logger, message, *args, **options)

    @functools.wraps(log)
    def noting_log(logger, level, message, *args, **options):
        if level >= logging.WARNING:
            note_if_it_says_so(logger, message, *args)
        options["stacklevel"] = options.get("stacklevel", 1) + 1
        return log(logger, level, message, *args, **options)

    warnings.warn = noting_warn
    logging.Logger.warning = noting_warning
    logging.Logger.log = noting_log


if os.environ.get("DEPRECATIONS_FILE"):
    watch()
