"""Parse the Python code that a completion contains, up to where it is no longer Python."""

import ast
import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass

from lora_grpo.grading.code_names import bound_names

_PARSE_ATTEMPTS = 4
# The start of a line that may begin a statement: not indented, and no closing bracket or comment.
_STATEMENT_LINE = re.compile(r"[^\s#)\]}]")
# Imports of names with a hundred dots, for which CPython needs quadratic time and memory.
_LONG_IMPORT = re.compile(r"\b(?:import|from)\b[\s\\]*(?:\w++[\s\\]*\.[\s\\]*+){100}")


@dataclass(frozen=True)
class Code:
    """Python code and its statements."""

    text: str
    body: list[ast.stmt]


def parse_start(text: str, attempts: int = _PARSE_ATTEMPTS) -> Code | None:
    """Parse text up to a truncated statement or prose. Return None if there is no Python before it.

    Args:
        attempts: maximum number of parses; with 1, all of it must be Python.
    """
    for _ in range(attempts):
        if _LONG_IMPORT.search(text):
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # for example, for "\d" in a string
                return Code(text, ast.parse(text).body)
        except SyntaxError as error:
            # The statement that contains the error starts on an earlier line that is not indented.
            lines = text.split("\n")
            first_bad_line = min(error.lineno or 1, len(lines)) - 1
            while first_bad_line > 0 and not _STATEMENT_LINE.match(lines[first_bad_line]):
                first_bad_line -= 1
            if first_bad_line <= 0:
                return None
            text = "\n".join(lines[:first_bad_line])
        except (ValueError, MemoryError, RecursionError):  # NUL characters and deep nesting
            return None
    return None


def defines(code: Code, name: str) -> bool:
    """Return whether the code defines or assigns the name at the top level. Imports do not count."""
    for statement in code.body:
        if not isinstance(statement, (ast.Import, ast.ImportFrom)) and name in bound_names(statement):
            return True
    return False


def last_function(code: Code, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the last definition of a function at the top level."""
    for statement in reversed(code.body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name == name:
            return statement
    return None


def is_future_import(statement: ast.stmt) -> bool:
    """Return whether a statement is `from __future__ import ...`, which must come first in a program."""
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def text_without(code: Code, statements: Collection[ast.stmt]) -> str:
    """Return the text of the code without these statements, except those that share a line with others."""
    removed_lines: set[int] = set()
    remaining_lines: set[int] = set()
    for statement in code.body:
        if statement in statements:
            removed_lines.update(_line_numbers(statement))
        else:
            remaining_lines.update(_line_numbers(statement))
    removed_lines -= remaining_lines

    lines = enumerate(code.text.split("\n"), start=1)
    return "\n".join(line for number, line in lines if number not in removed_lines)


def _line_numbers(statement: ast.stmt) -> range:
    """Return the numbers of the lines of a statement and its decorators, from 1."""
    decorators = getattr(statement, "decorator_list", [])
    first = min(node.lineno for node in [statement, *decorators])
    last = statement.end_lineno or first
    return range(first, last + 1)
