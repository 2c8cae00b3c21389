"""Compile and check tests in the trusted process, once for all candidates."""

import ast
import functools
import marshal
import warnings
from typing import Any, cast

from lora_grpo.sandbox.examiner import ASSERTS
from lora_grpo.sandbox.verdict import BrokenTest, Program


def prepare(program: Program) -> bytes:
    """Compile the tests of a program for the process that runs them.

    Raises:
        BrokenTest: the tests are not Python or assert nothing.
    """
    try:
        return _compiled(program.prelude, program.test, program.functions)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenTest(f"the tests of {program.name} cannot run: {type(error).__name__}: {error}") from None


@functools.lru_cache(maxsize=1024)
def _compiled(prelude: str, test: str, functions: tuple[str, ...]) -> bytes:
    """Return the arguments of `examiner.examine`. marshal is fast, and the zygotes have the same interpreter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example "assertion is always true"
        tree: Any = ast.parse(test)
        # Statements that can fail: an assert, a raise, or a method such as unittest's assertEqual.
        nodes = [*ast.walk(tree), *ast.walk(ast.parse(prelude))]
        methods = any(isinstance(node, ast.Attribute) and node.attr.startswith("assert") for node in nodes)
        if not methods and not any(isinstance(node, (ast.Assert, ast.Raise)) for node in nodes):
            raise ValueError("they assert nothing")
        counted = _Counted(tree)
        tree = ast.fix_missing_locations(counted.visit(tree))
        code = compile(tree, "<test>", "exec", dont_inherit=True)
        first = compile(prelude, "<prelude>", "exec", dont_inherit=True)
    return marshal.dumps((first, code, functions, test, counted.number))


class _Counted(ast.NodeTransformer):
    """Number the asserts, and run each one even if earlier asserts failed.

    If tests ended at the first failed assert, a further call would tell the candidate that its last answer was correct.

    An assert in a loop counts once. An assert in a `try` or `with` statement is unchanged, because the statement may
    expect its exception. So are the asserts of a function that such a statement uses, or that is an argument, as in
    `assert raises(body)`, and an assert without a name, such as `assert True`.
    """

    catching = (ast.Try, ast.TryStar, ast.With, ast.AsyncWith)

    def __init__(self, tree: ast.Module) -> None:
        self.number = 0
        nodes = [*ast.walk(tree)]
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        inside = [part for node in nodes if isinstance(node, self.catching) for part in ast.walk(node)]
        used = [node for node in nodes if id(node) not in called]
        self.expected = {node.id for node in (*inside, *used) if isinstance(node, ast.Name)}

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, self.catching) or (isinstance(node, ast.FunctionDef) and node.name in self.expected):
            return node
        if not isinstance(node, ast.Assert) or not any(isinstance(part, ast.Name) for part in ast.walk(node.test)):
            return self.generic_visit(node)
        guard = cast(ast.With, ast.parse(f"with {ASSERTS}[{self.number}]:\n pass").body[0])
        guard.body = [node]
        self.number += 1
        return ast.copy_location(guard, node)
