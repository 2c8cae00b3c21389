"""The names of a module that its statements bind and read."""

import ast

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

DEMONSTRATING_NAMES = frozenset(
    {"assert", "print", "input", "open", "exit", "quit", "argv", "stdin", "__name__", "doctest", "unittest"}
)
"""Names, attributes and statements that show that code demonstrates a function; see `demonstrations.py`."""


def bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds in the module."""
    if isinstance(statement, ast.ClassDef):
        return {statement.name}

    bound: set[str] = set()
    nodes: list[ast.AST] = [statement]
    while nodes:
        node = nodes.pop()
        if isinstance(node, _FUNCTIONS):  # their bodies do not run
            nodes.append(node.args)
            nodes.extend(getattr(node, "decorator_list", []))
        else:
            nodes.extend(ast.iter_child_nodes(node))

        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        else:  # functions, classes, `except ... as name`, and the patterns of `match`
            name = getattr(node, "name", None)
            if name:
                bound.add(name)
    return bound


def read_names(statement: ast.AST) -> set[str]:
    """Return the names of the module that a statement reads, at once or in the functions that it defines.

    These include the attributes and the statements in `DEMONSTRATING_NAMES`.
    """
    read: set[str] = set()
    stored: set[str] = set()
    declared_global: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored.add(node.id)
        elif isinstance(node, ast.Name):
            read.add(node.id)
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
        elif isinstance(node, ast.Global):
            declared_global.update(node.names)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read.add(node.target.id)
        elif isinstance(node, ast.Attribute) and node.attr in DEMONSTRATING_NAMES:
            read.add(node.attr)
        elif isinstance(node, ast.Assert):
            read.add("assert")

    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        local_names = stored - declared_global
        return read - local_names
    return read
