"""Wrong programs: correct ones with one change."""

import ast
import copy
import random
from collections.abc import Iterator
from typing import Any

OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitOr,
}  # fmt: skip
ANSWERS = [0, 1, None, True, [], "", ()]


def changes(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield possible changes of one node: the kind of change and a function that applies it to a copy of the node."""
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        yield "operator", lambda node: setattr(node, "op", OPERATORS[type(node.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield "comparison", lambda node: node.ops.__setitem__(0, OPERATORS[type(node.ops[0])]())
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "plus one", lambda node: setattr(node, "value", node.value + 1)
        yield "minus one", lambda node: setattr(node, "value", node.value - 1)
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "negated", lambda node: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Return) and node.value is not None:
        for answer in ANSWERS:
            constant = ast.parse(repr(answer)).body[0].value
            yield "constant answer", lambda node, constant=constant: setattr(node, "value", constant)
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        yield "swapped arguments", lambda node: node.args.reverse()
    body = getattr(node, "body", None)
    if isinstance(body, list) and isinstance(node, ast.stmt) and not isinstance(node, ast.ClassDef):
        for index in range(len(body)):
            yield "deleted statement", lambda node, index=index: node.body.__setitem__(index, ast.Pass())
        yield "empty body", lambda node: setattr(node, "body", [ast.Pass()])
        yield "raises", lambda node: node.body.insert(0, ast.parse("raise ValueError('mutant')").body[0])


def mutants(source: str, number: int, generator: random.Random, function: str | None = None) -> list[str]:
    """Return programs that differ from the source in one change, with as many kinds of changes as possible.

    Args:
        source: a correct program.
        number: maximum number of mutants; fewer if there are not enough possible changes.
        generator: selects the changes.
        function: the function to change; None means the whole program.
    """
    tree = ast.parse(source)
    changed_part: ast.AST = tree
    for statement in tree.body:
        if function and getattr(statement, "name", None) == function:
            changed_part = statement
            break

    # All changes, by their kind: the position of the node in `ast.walk`, and what changes it.
    changes_of_kind: dict[str, list[tuple[int, Any]]] = {}
    may_change = {id(node) for node in ast.walk(changed_part)}
    for position, node in enumerate(ast.walk(tree)):
        if id(node) in may_change:
            for kind, change in changes(node):
                changes_of_kind.setdefault(kind, []).append((position, change))

    # One change of each kind, in random order, until there are enough.
    for changes_of_one_kind in changes_of_kind.values():
        generator.shuffle(changes_of_one_kind)
    selected = []
    while len(selected) < number and any(changes_of_kind.values()):
        kinds = [kind for kind, remaining in sorted(changes_of_kind.items()) if remaining]
        generator.shuffle(kinds)
        selected += [changes_of_kind[kind].pop() for kind in kinds]

    programs = []
    for position, change in selected[:number]:
        mutant = copy.deepcopy(tree)
        change(list(ast.walk(mutant))[position])
        programs.append(ast.unparse(ast.fix_missing_locations(mutant)))
    return programs
