"""Common bugs in a tiny function: wrong operator, off-by-one error, wrong order, no return, printed result."""

from __future__ import annotations

import ast
from collections.abc import Iterator

OPERATORS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Add: ("-",),
    ast.Sub: ("+",),
    ast.Mult: ("+",),
    ast.FloorDiv: ("%",),
    ast.Mod: ("//",),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<="),
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">="),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
}
"""Operators with which each operator is confused."""
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.FloorDiv: "//", ast.Mod: "%"}
NAMES = {"max": "min", "min": "max", "sum": "len", "len": "sum", ".upper": ".lower", ".lower": ".upper"}


def without_return(solution: str) -> str:
    """Return the function without its `return` keywords."""
    return solution.replace("return ", "")


def printed(solution: str) -> str:
    """Return the function with its results printed instead of returned."""
    lines = solution.split("\n")
    return "\n".join(f"{line.replace('return ', 'print(')})" if "return " in line else line for line in lines)


def _span(source: str, node: ast.expr | ast.Slice) -> tuple[int, int]:
    """Return the start and end in the source of a node on one line."""
    start_of_line = sum(len(line) + 1 for line in source.split("\n")[: node.lineno - 1])
    assert node.end_col_offset is not None
    return start_of_line + node.col_offset, start_of_line + node.end_col_offset


def _between(source: str, left: ast.expr, right: ast.expr) -> tuple[int, int]:
    """Return the start and end of the operator between two adjacent operands."""
    start, end = _span(source, left)[1], _span(source, right)[0]
    return start + 1, end - 1


def _replacements(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield every replacement (start, end, new text) that introduces one bug."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            for sign in OPERATORS[type(node.op)]:
                yield *_between(source, node.left, node.right), sign
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            if not isinstance(node.op, (ast.Add, ast.Mult)) or "'" in left + right:
                yield *_span(source, node), f"{right} {SIGNS[type(node.op)]} {left}"
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for before, operator, after in zip(operands, node.ops, operands[1:], strict=False):
                for sign in OPERATORS[type(operator)]:
                    yield *_between(source, before, after), sign
        elif isinstance(node, ast.Slice) and node.step is None:
            lower, upper = (ast.unparse(end) if end else "" for end in (node.lower, node.upper))
            yield *_span(source, node), f"{upper}:{lower}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            for number in (node.value - 1, node.value + 1):
                yield *_span(source, node), str(number)
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield *_span(source, node), NAMES[node.id]
        elif isinstance(node, ast.Attribute) and f".{node.attr}" in NAMES:
            yield *_span(source, node), ast.unparse(node.value) + NAMES[f".{node.attr}"]


def slips(solution: str) -> list[str]:
    """Return variants of the function with one bug each.

    Args:
        solution: the source of one function, with one space around every operator.
    """
    tree = ast.parse(solution).body[0]
    assert isinstance(tree, ast.FunctionDef)
    parameters = [argument.arg for argument in tree.args.args]
    variants = [solution[:start] + new + solution[end:] for start, end, new in _replacements(solution)]
    if len(parameters) == 2:
        head, _, body = solution.partition("\n")
        variants.append(head.replace(", ".join(parameters), ", ".join(reversed(parameters))) + "\n" + body)
    return variants
