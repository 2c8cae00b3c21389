"""Analyze Python source: find the names that code defines and uses, and assemble programs.

Model text is parsed in the trainer's process, so the callers bound its length (`code_extraction.MAX_CHARS`). Up to
that length, the parser's time and memory are small, except for imports of long dotted names, which `_try` refuses.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

_STATEMENT_LINE = re.compile(r"[^\s#)\]}]")
_LONG_IMPORT = re.compile(r"\b(?:import|from)\b[\s\\]*(?:\w++[\s\\]*\.[\s\\]*+){100}")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_DEMONSTRATION = {
    "assert",
    "print",
    "input",
    "open",
    "exit",
    "quit",
    "argv",
    "stdin",
    "__name__",
    "doctest",
    "unittest",
}
_PARSE_ATTEMPTS = 4


class Code(NamedTuple):
    text: str
    body: list[ast.stmt]


def parse_start(text: str) -> Code | None:
    """Parse text up to a truncated statement or prose. Return None if there is no Python before it."""
    for _ in range(_PARSE_ATTEMPTS):
        code = _try(text)
        if code is None or isinstance(code, Code):
            return code
        # The statement that contains the error starts on an earlier line that is not indented.
        lines = text.split("\n")
        cut = min(code, len(lines)) - 1
        while cut > 0 and not _STATEMENT_LINE.match(lines[cut]):
            cut -= 1
        if cut <= 0:
            return None
        text = "\n".join(lines[:cut])
    return None


def defines(code: Code, name: str) -> bool:
    """Return whether the code defines or assigns the name at the top level. Imports do not count."""
    return any(name in bound_names(node) for node in code.body if not isinstance(node, (ast.Import, ast.ImportFrom)))


def assemble(code: Code, entry_point: str, prefix: str = "", earlier: Sequence[str] = ()) -> str:
    """Assemble the program from code that defines the entry point, without demonstrations.

    The imports and helper functions of the prompt, `prefix`, come first, then definitions from `earlier` sources of
    names that the code uses but does not define.
    """
    start = _parse(prefix)
    known = {*dir(builtins)}.union(*(bound_names(node) for node in (start.body if start else ())))
    parts = [_without_demonstrations(code, entry_point, {entry_point})]
    for text in reversed(earlier):
        known = known.union(*(bound_names(node) for part in parts for node in part.body))
        missing = set().union(*(_read(node) for part in parts for node in part.body)) - known
        part = parse_start(text) if missing else None
        if part and not missing.isdisjoint(set().union(*map(bound_names, part.body))):
            parts.insert(0, _without_demonstrations(part, entry_point, missing))
    # Future imports must be the first statements of a program.
    future = "".join(f"{ast.unparse(node)}\n" for part in parts for node in part.body if _is_future(node))
    return future + context(prefix, entry_point) + "\n\n".join(part.text.strip("\n") for part in parts) + "\n"


def context(prefix: str, entry_point: str) -> str:
    """Return the prompt's imports and helper functions, without the entry point."""
    code = _parse(prefix)
    function = code and _function(code, entry_point)
    if not code or not function or len(code.body) == 1:
        return ""
    return _without(code, [function]).text.strip("\n") + "\n\n\n"


def under_signature(body: str, entry_point: str, prefix: str) -> str | None:
    """Return a program with `body` under the prompt's signature. Return None if there is no signature or valid body.

    The body may have any indentation, and its first line may lack it.
    """
    start = _parse(prefix)
    stub = start and _function(start, entry_point)
    if not stub:
        return None
    indent = " " * stub.body[0].col_offset
    body = body.strip("\n")
    first, _, rest = body.partition("\n")
    candidates = [body] if body[:1] in (" ", "\t") else []
    candidates += [textwrap.indent(textwrap.dedent(body), indent), f"{indent}{first.lstrip()}\n{rest}"]
    for candidate in candidates:
        code = parse_start(f"{prefix.rstrip()}\n{candidate}")
        function = code and _function(code, entry_point)
        if code and function and len(function.body) > len(stub.body):
            return assemble(code, entry_point)
    return None


def bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds in the module."""
    if isinstance(statement, ast.ClassDef):
        return {statement.name}
    bound: set[str] = set()
    for node in _module_nodes(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        else:  # Functions, classes, `except ... as name`, and the patterns of `match`.
            bound.add(getattr(node, "name", None) or "")
    return bound - {""}


def _parse(text: str) -> Code | None:
    code = _try(text)
    return code if isinstance(code, Code) else None


def _try(text: str) -> Code | int | None:
    """Parse text. Return the line number of a syntax error, or None for an error without a line number."""
    if _LONG_IMPORT.search(text):  # CPython needs quadratic time and memory for these.
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # For example, for "\d" in a string.
            return Code(text, ast.parse(text).body)
    except SyntaxError as error:
        return error.lineno or 1
    except (ValueError, MemoryError, RecursionError):  # NUL characters and deep nesting.
        return None


def _function(code: Code, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for node in reversed(code.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return node
    return None


def _module_nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """Iterate over the nodes that run when the statement does: all except the bodies of functions."""
    nodes = [statement]
    while nodes:
        node = nodes.pop()
        yield node
        if isinstance(node, _FUNCTIONS):
            nodes += [node.args, *getattr(node, "decorator_list", [])]
        else:
            nodes += ast.iter_child_nodes(node)


def _read(statement: ast.AST) -> set[str]:
    """Return the names of the module that a statement reads, at once or in the functions that it defines.

    These include the attributes and the statements in `_DEMONSTRATION`.
    """
    nodes = list(ast.walk(statement))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    read = {node.id for node in names if not isinstance(node.ctx, ast.Store)}
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        shared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        local = {node.id for node in names if isinstance(node.ctx, ast.Store)} - shared
        read -= local | {node.arg for node in nodes if isinstance(node, ast.arg)}
    else:
        read |= {
            node.target.id for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
        }
    read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)} & _DEMONSTRATION
    return read | ({"assert"} if any(isinstance(node, ast.Assert) for node in nodes) else set())


def _without_demonstrations(code: Code, entry_point: str, wanted: Collection[str]) -> Code:
    """Drop demonstrations, except those that the wanted names need.

    A demonstration is a statement that calls the entry point, prints, asserts, or reads input, itself or through names
    that other demonstrations bind. A name needs the statements that bind it, and what those read.

    Future imports must come first in the program, so they remain only in the returned statements, not in the text.
    """
    reads = [*map(_read, code.body)]
    binds = [*map(bound_names, code.body)]
    shown = {entry_point, *_DEMONSTRATION}
    demonstrations = []
    for node, read in zip(code.body, reads, strict=True):
        sets_part = isinstance(getattr(node, "targets", [None])[0], (ast.Attribute, ast.Subscript))  # `f.cache = {}`
        if read & shown and not sets_part:  # It may be a function that demonstrates, such as `main` or `test_f`.
            shown |= bound_names(node) - {entry_point}
            demonstrations += [] if isinstance(node, _DEFINITIONS) else [node]
    needed: set[str] = {*wanted}
    size = 0
    while len(needed) > size:
        size = len(needed)
        needed = needed.union(*(read for read, names in zip(reads, binds, strict=True) if names & needed))
    needing = {
        node for node, names in zip(code.body, binds, strict=True) if names & needed and not _is_main_guard(node)
    }
    gone = [node for node in demonstrations if node not in needing]
    future = [node for node in code.body if _is_future(node)]
    return Code(_without(code, [*gone, *future]).text, [node for node in code.body if node not in gone])


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in _read(node.test)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _without(code: Code, statements: Collection[ast.stmt]) -> Code:
    """Return the code without these statements, except those that share a line with others."""
    body = [node for node in code.body if node not in statements]
    kept = {line for node in body for line in _lines(node)}
    gone = {line for node in statements for line in _lines(node)} - kept
    lines = [line for number, line in enumerate(code.text.split("\n"), 1) if number not in gone]
    return Code("\n".join(lines), body)


def _lines(statement: ast.stmt) -> range:
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(node.lineno for node in decorators)])
    return range(first, (statement.end_lineno or first) + 1)
