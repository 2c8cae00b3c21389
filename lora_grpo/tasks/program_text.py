"""Analyze Python source: find the names that code defines and uses, and assemble programs."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

_STATEMENT_LINE = re.compile(r"[^\s#)\]}]")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_PARSE_ATTEMPTS = 6


class Code(NamedTuple):
    text: str
    body: list[ast.stmt]


def parse_start(text: str) -> Code | None:
    """Parse text up to a truncated statement or prose. Return None if there is no Python before it."""
    for _ in range(_PARSE_ATTEMPTS):
        code = _try(text)
        if code is None or isinstance(code, Code):
            return code
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
    """Assemble the program from code that defines the entry point, without the examples that follow it.

    The imports and helper functions of the prompt, `prefix`, come first, then definitions from `earlier` sources of
    names that the code uses but does not define.
    """
    parts = [*_borrowed(code, prefix, earlier), _without_examples(code, entry_point)]
    opening, texts = "", []
    for part in parts:
        # Future imports must come first in the program.
        future = {node for node in part.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"}
        opening += "".join(f"{ast.unparse(node)}\n" for node in part.body if node in future)
        texts.append(_without(part, future).text.strip("\n"))
    return opening + context(prefix, entry_point) + "\n\n".join(texts) + "\n"


def context(prefix: str, entry_point: str) -> str:
    """Return the prompt's imports and helper functions, without the entry point."""
    code = _parse(prefix)
    function = code and _function(code, entry_point)
    if not code or not function or len(code.body) == 1:
        return ""
    return _without(code, {function}).text.strip("\n") + "\n\n\n"


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
    if "\t" in body:  # Some lines may use tabs and others spaces.
        candidates.append(textwrap.indent(textwrap.dedent(body.expandtabs(4)), indent))
    for candidate in candidates:
        code = parse_start(f"{prefix.rstrip()}\n{candidate}")
        function = code and _function(code, entry_point)
        if code and function and len(function.body) > len(stub.body):
            return assemble(code, entry_point)
    return None


def _parse(text: str) -> Code | None:
    code = _try(text)
    return code if isinstance(code, Code) else None


def _try(text: str) -> Code | int | None:
    """Parse text. Return the line number of a syntax error, or None for an error without a line number."""
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


def bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that a definition, import or assignment binds."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
        return {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return set()


def _used(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements read but do not bind."""
    used: set[str] = set()
    for statement in statements:
        nodes = list(ast.walk(statement))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        inside = {node.arg for node in nodes if isinstance(node, ast.arg)}
        inside |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        inside -= {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        used |= {node.id for node in names if isinstance(node.ctx, ast.Load)} - inside
    return used


def _without_examples(code: Code, entry_point: str) -> Code:
    """Drop statements after the entry point, except definitions and those that set a value that a definition reads."""
    first = next(index for index, node in enumerate(code.body) if entry_point in bound_names(node))
    wanted = _used(node for node in code.body if isinstance(node, _DEFINITIONS)) | {entry_point}
    after = code.body[first + 1 :]
    # Statements without a binding may fill a table that a definition reads: `table.append(1)`, `table[2] = 3`.
    tables = wanted & set().union(*map(bound_names, (node for node in after if not isinstance(node, _DEFINITIONS))))
    tables -= {entry_point}
    filling = {node for node in after if not tables.isdisjoint(_names(node)) and entry_point not in _names(node)}
    return _without(code, {node for node in after if _is_idle(node, wanted) and node not in filling})


def _names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _is_idle(statement: ast.stmt, wanted: set[str]) -> bool:
    return not isinstance(statement, _DEFINITIONS) and wanted.isdisjoint(bound_names(statement))


def _borrowed(code: Code, prefix: str, earlier: Sequence[str]) -> list[Code]:
    """Return, in order, the definitions from earlier sources that the code uses but does not define."""
    start = _parse(prefix)
    known = set(dir(builtins)).union(*(bound_names(node) for part in (code, start) if part for node in part.body))
    missing = _used(code.body) - known
    borrowed: list[Code] = []
    for text in reversed(earlier):
        part = _parse(text) if missing else None
        if part is None or missing.isdisjoint(set().union(*map(bound_names, part.body))):
            continue
        wanted = missing | _used(node for node in part.body if isinstance(node, _DEFINITIONS))
        kept = _without(part, {node for node in part.body if _is_idle(node, wanted)})
        borrowed.append(kept)
        known = known.union(*map(bound_names, kept.body))
        missing = (missing | _used(kept.body)) - known
    return borrowed[::-1]


def _without(code: Code, statements: Collection[ast.stmt]) -> Code:
    """Return the code without the lines of these statements, except lines shared with other statements."""
    if not statements:
        return code
    body = [node for node in code.body if node not in statements]
    dropped = {line for node in statements for line in _lines(node)}
    dropped -= {line for node in body for line in _lines(node)}
    lines = enumerate(code.text.split("\n"), start=1)
    return Code("\n".join(line for number, line in lines if number not in dropped), body)


def _lines(statement: ast.stmt) -> range:
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(node.lineno for node in decorators)])
    return range(first, (statement.end_lineno or first) + 1)
