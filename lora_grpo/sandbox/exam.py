"""Compile and check tests in the trusted process, once for all candidates."""

from __future__ import annotations

import ast
import functools
import marshal
import warnings
from types import CodeType
from typing import Any, cast

from lora_grpo.sandbox.examiner import ASSERTS
from lora_grpo.sandbox.verdict import BrokenTest, Program


def prepare(program: Program) -> bytes:
    """Compile the tests of a program for the process that runs them.

    Raises:
        BrokenTest: the tests are not Python or assert nothing.
    """
    try:
        prelude, imports, test, number = _compiled(program.prelude, program.test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenTest(f"the tests of {program.name} cannot run: {type(error).__name__}: {error}") from None
    # marshal is fast. It requires the same interpreter, which the zygotes use.
    return marshal.dumps((prelude, imports, test, list(program.functions), program.test, number))


@functools.lru_cache(maxsize=1024)
def _compiled(prelude: str, test: str) -> tuple[CodeType, CodeType, CodeType, int]:
    """Return the code of the prelude, of the test's imports, and of the test, and the number of counted asserts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example "assertion is always true"
        tree: Any = ast.parse(test)
        if not any(map(_can_fail, (*ast.walk(tree), *ast.walk(ast.parse(prelude))))):
            raise ValueError("they assert nothing")
        counted = _Counted(tree)
        tree = ast.fix_missing_locations(counted.visit(tree))
        imports = ast.Module([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
        return (
            compile(prelude, "<prelude>", "exec", dont_inherit=True),
            compile(imports, "<test>", "exec", dont_inherit=True),
            compile(tree, "<test>", "exec", dont_inherit=True),
            counted.number,
        )


def _can_fail(node: ast.AST) -> bool:
    """Return whether a node can make a test fail: an assert, a raise, or a method such as unittest's assertEqual."""
    return isinstance(node, (ast.Assert, ast.Raise)) or (isinstance(node, ast.Attribute) and node.attr[:6] == "assert")


_CATCHING = (ast.Try, ast.TryStar, ast.With, ast.AsyncWith)


class _Counted(ast.NodeTransformer):
    """Number the asserts, and run each one even if earlier asserts failed.

    If tests ended at the first failed assert, a further call would tell the candidate that its last answer was right.

    An assert in a loop counts once. An assert in a `try` or `with` statement is unchanged, because the statement may
    expect its exception. So are the asserts of a function that such a statement uses, or that is an argument, as in
    `assert raises(body)`.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.number = 0
        nodes = [*ast.walk(tree)]
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        inside = [part for node in nodes if isinstance(node, _CATCHING) for part in ast.walk(node)]
        used = [node for node in nodes if id(node) not in called]
        self.expected = {node.id for node in (*inside, *used) if isinstance(node, ast.Name)}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node if node.name in self.expected else cast(ast.stmt, self.generic_visit(node))

    def visit_Try(self, node: ast.stmt) -> ast.stmt:
        return node

    visit_TryStar = visit_With = visit_AsyncWith = visit_Try

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Put the assert into a `with` statement. An assert without a name, such as `assert True`, is unchanged."""
        if not any(isinstance(part, ast.Name) for part in ast.walk(node.test)):
            return node
        guard = ast.parse(f"with {ASSERTS}[{self.number}]:\n pass").body[0]
        assert isinstance(guard, ast.With)
        guard.body = [node]
        self.number += 1
        return ast.copy_location(guard, node)
