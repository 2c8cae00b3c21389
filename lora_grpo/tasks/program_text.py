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
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

_STATEMENT_LINE = re.compile(r"[^\s#)\]}]")
_LONG_IMPORT = re.compile(r"\b(?:import|from)\b[\s\\]*(?:\w++[\s\\]*\.[\s\\]*+){100}")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_DEMONSTRATION = {"assert", "print", "input", "open", "exit", "quit", "breakpoint", "argv", "stdin", "stdout"}
_DEMONSTRATION |= {"__name__", "argparse", "undefined", "doctest", "pytest", "timeit", "unittest"}
_IN_PLACE = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"}
_IN_PLACE |= {"remove", "reverse", "setdefault", "sort", "update"}
_ARGUMENTS = "(arguments)"
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
    known = {*dir(builtins), "__file__"}.union(*(bound_names(node) for node in (start.body if start else ())))
    parts = _borrowed(code, entry_point, known, earlier)
    known = known.union(*(bound_names(node) for part in parts for node in part.body))
    parts.append(_without_demonstrations(code, entry_point, {entry_point}, known))
    opening, texts = "", []
    for part in parts:
        opening += "".join(f"{ast.unparse(node)}\n" for node in part.body if _is_future(node))
        texts.append(part.text.strip("\n"))
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


def _changed(statement: ast.stmt) -> set[str]:
    """Return the names whose objects a statement changes: `name.x = 1`, `name[0] = 1`, `name.append(1)`."""
    changed: set[str] = set()
    for node in _module_nodes(statement):
        call = node.value if isinstance(node, ast.Expr) else None
        target = call.func if isinstance(call, ast.Call) else node
        if isinstance(target, (ast.Attribute, ast.Subscript)) and (call or not _is_read(target)):
            changed |= _owner(target)
    return changed


def _owner(node: ast.expr) -> set[str]:
    """Return the name whose object an expression such as `name`, `name.x` or `name[0]` belongs to."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _filled(statement: ast.stmt, effects: Mapping[str, set[str]]) -> set[str]:
    """Return the names whose objects a statement may change through calls: `fill(name)`, `print(name.append(1))`.

    A call of one of the module's functions, the keys of `effects`, has that function's effects.
    """
    filled: set[str] = set()
    for node in _module_nodes(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _IN_PLACE:
            filled |= _owner(node.func)
        call = node.value if isinstance(node, (ast.Expr, ast.Assign)) else None
        if not isinstance(call, ast.Call):
            continue
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        unknown = isinstance(node, ast.Expr) and not hasattr(builtins, name)
        changed = effects.get(name, {_ARGUMENTS} if unknown else set())
        filled |= changed - {_ARGUMENTS}
        if _ARGUMENTS in changed:
            filled = filled.union(*map(_owner, [*call.args, *(keyword.value for keyword in call.keywords)]))
    return filled


def _effects(code: Code) -> dict[str, set[str]]:
    """Return the names that each function of the module assigns or changes, and `_ARGUMENTS` if it changes those."""
    effects: dict[str, set[str]] = {}
    for function in code.body:
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes = [node for statement in function.body for node in _module_nodes(statement)]
            shared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
            arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
            local = set().union(*map(bound_names, function.body)) - shared
            changed = shared.union(*map(_changed, function.body), *(_filled(node, effects) for node in function.body))
            own = {_ARGUMENTS} if changed & arguments else set()
            effects[function.name] = effects.get(function.name, set()) | own | (changed - arguments - local)
    return effects


def _is_read(node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Load)


def _read_at_once(statement: ast.stmt) -> set[str]:
    """Return the names that a statement reads when it runs, except its loop variables."""
    read: set[str] = set()
    loop: set[str] = set()
    for node in _module_nodes(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            read.add(node.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read.add(node.target.id)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            loop |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
    return read - loop


def _read(statement: ast.stmt) -> set[str]:
    """Return the names of the module that a statement reads, at once or in the functions that it defines."""
    read = _read_at_once(statement)
    for function in _module_nodes(statement):
        if isinstance(function, _FUNCTIONS):
            nodes = list(ast.walk(function))
            names = [node for node in nodes if isinstance(node, ast.Name)]
            inside = {node.arg for node in nodes if isinstance(node, ast.arg)}
            inside |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
            inside -= {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
            read |= {node.id for node in names if not isinstance(node.ctx, ast.Store)} - inside
    return read


def _without_demonstrations(code: Code, entry_point: str, wanted: Collection[str], known: set[str]) -> Code:
    """Drop demonstrations, except those that the wanted names need.

    A demonstration is a statement that uses the entry point, prints, asserts or reads input, itself or through names
    that other demonstrations bind. So is one that reads a name that nothing defines, such as the prose `Note: done`.
    A name needs the statements that bind it or change its object, and what those read. Imports and definitions stay.
    A call may change objects too, such as `fill(table)`, if all that makes it a demonstration is a print or an assert.

    Future imports must come first in the program, so they remain only in the returned statements, not in the text.
    """
    future = {node for node in code.body if _is_future(node)}
    if all(isinstance(node, _DEFINITIONS) for node in code.body):
        return Code(_without(code, future).text, code.body)
    binds, reads = [*map(bound_names, code.body)], [*map(_read, code.body)]
    imports = set().union(*(names for node, names in zip(code.body, binds, strict=True) if _is_import(node)))
    known = known.union(*binds)
    needed_by, users = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    start = {*wanted}
    for index, node in enumerate(code.body):
        used = reads[index] | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)} & _DEMONSTRATION
        used |= {"assert" for part in _module_nodes(node) if isinstance(part, ast.Assert)}
        if isinstance(node, _DEFINITIONS):
            start |= _read_at_once(node)
        elif "*" not in known and not _read_at_once(node) <= known:
            used.add("undefined")
        for name in used:
            users[name].append(index)
        if not _is_main_guard(node):
            for name in binds[index] | (_changed(node) - imports):
                needed_by[name].append(index)
    sure = _reachable({entry_point, *_DEMONSTRATION} - {"print", "assert"}, users, binds)
    effects = _effects(code)
    for index, node in enumerate(code.body):
        if index not in sure and not isinstance(node, _DEFINITIONS):
            for name in _filled(node, effects) - imports:
                needed_by[name].append(index)
    needs = [read - bound for read, bound in zip(reads, binds, strict=True)]
    needed = _reachable(start, needed_by, needs)
    dropped = _reachable({entry_point, *_DEMONSTRATION}, users, binds) - needed
    gone = {code.body[index] for index in dropped if not isinstance(code.body[index], _DEFINITIONS)}
    return Code(_without(code, gone | future).text, [node for node in code.body if node not in gone])


def _reachable(names: Iterable[str], statements: Mapping[str, list[int]], leads_to: list[set[str]]) -> set[int]:
    """Return the statements of these names, of the names that those lead to, and so on."""
    seen = {*names}
    queue = [*seen]
    found: set[int] = set()
    while queue:
        for index in statements.get(queue.pop(), ()):
            if index not in found:
                found.add(index)
                queue += leads_to[index] - seen
                seen |= leads_to[index]
    return found


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in _read_at_once(ast.Expr(node.test))


def _borrowed(code: Code, entry_point: str, known: set[str], earlier: Sequence[str]) -> list[Code]:
    """Return, in order, the statements from earlier sources that bind names that the code uses but does not define."""
    if not earlier:
        return []
    known = known.union(*map(bound_names, code.body))
    missing = set().union(*map(_read, code.body)) - known
    borrowed: list[Code] = []
    for text in reversed(earlier):
        part = parse_start(text) if missing else None
        if part is None or missing.isdisjoint(set().union(*map(bound_names, part.body))):
            continue
        kept = _without_demonstrations(part, entry_point, missing, known)
        borrowed.append(kept)
        known = known.union(*map(bound_names, kept.body))
        missing = (missing | set().union(*map(_read, kept.body))) - known
    return borrowed[::-1]


def _without(code: Code, statements: Collection[ast.stmt]) -> Code:
    """Return the code without these statements. On lines shared with other statements, `pass` takes their place."""
    if not statements:
        return code
    body = [node for node in code.body if node not in statements]
    shared = {line for node in body for line in _lines(node)}
    lines: list[bytes | None] = [*code.text.encode().split(b"\n")]
    for node in reversed(code.body):
        for number in _lines(node) if node in statements else ():
            line = lines[number - 1] or b""
            start = node.col_offset if number == node.lineno else 0
            end = node.end_col_offset if number == node.end_lineno else len(line)
            lines[number - 1] = line[:start] + b"pass" + line[end:] if number in shared else None
    return Code(b"\n".join(line for line in lines if line is not None).decode(), body)


def _lines(statement: ast.stmt) -> range:
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(node.lineno for node in decorators)])
    return range(first, (statement.end_lineno or first) + 1)
