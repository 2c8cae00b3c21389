"""Drop demonstrations from a program: statements that call the function that was asked for, print, or read input.

Models show how their function is used. Such code would fail, wait for input, or waste the time of the tests.
"""

import ast
from collections.abc import Collection

from lora_grpo.grading.code_names import DEMONSTRATING_NAMES, bound_names, read_names
from lora_grpo.grading.code_parsing import Code, is_future_import, text_without

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def without_demonstrations(code: Code, entry_point: str, wanted: Collection[str]) -> Code:
    """Drop demonstrations, except those that the wanted names need.

    A demonstration is a statement that calls the entry point, prints, asserts, or reads input, itself or through names
    that other demonstrations bind. A name needs the statements that bind it, and the names that those read.

    Future imports must come first in the program, so they remain only in the returned statements, not in the text.
    """
    read_by_statement = [read_names(statement) for statement in code.body]
    bound_by_statement = [bound_names(statement) for statement in code.body]
    demonstrations = _demonstrations(code, entry_point, read_by_statement)
    needed_names = _needed_names(wanted, read_by_statement, bound_by_statement)

    dropped = []
    for statement, bound in zip(code.body, bound_by_statement, strict=True):
        if statement not in demonstrations:
            continue
        is_needed = not bound.isdisjoint(needed_names)
        if not is_needed or _is_main_block(statement):
            dropped.append(statement)

    future_imports = [statement for statement in code.body if is_future_import(statement)]
    text = text_without(code, [*dropped, *future_imports])
    return Code(text, [statement for statement in code.body if statement not in dropped])


def _demonstrations(code: Code, entry_point: str, read_by_statement: list[set[str]]) -> list[ast.stmt]:
    # A function that demonstrates, such as `main` or `test_f`, is no demonstration itself, but calling it is.
    demonstrating_names = {entry_point, *DEMONSTRATING_NAMES}
    demonstrations = []
    for statement, read in zip(code.body, read_by_statement, strict=True):
        if read.isdisjoint(demonstrating_names) or _sets_attribute(statement):
            continue
        demonstrating_names |= bound_names(statement) - {entry_point}
        if not isinstance(statement, _DEFINITIONS):
            demonstrations.append(statement)
    return demonstrations


def _needed_names(
    wanted: Collection[str], read_by_statement: list[set[str]], bound_by_statement: list[set[str]]
) -> set[str]:
    """Return the wanted names, and all names that the statements that bind them read."""
    needed_names = set(wanted)
    size_before = -1
    while len(needed_names) > size_before:
        size_before = len(needed_names)
        newly_needed: set[str] = set()
        for read, bound in zip(read_by_statement, bound_by_statement, strict=True):
            if not bound.isdisjoint(needed_names):
                newly_needed |= read
        needed_names |= newly_needed
    return needed_names


def _sets_attribute(statement: ast.stmt) -> bool:
    """Return whether a statement sets a part of an object, as `f.cache = {}` does."""
    targets = getattr(statement, "targets", [None])
    return isinstance(targets[0], (ast.Attribute, ast.Subscript))


def _is_main_block(statement: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ == "__main__"`, in which no name is bound that a function needs."""
    return isinstance(statement, ast.If) and "__name__" in read_names(statement.test)
