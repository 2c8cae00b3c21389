"""Compile and check tests in the trusted process, once for all candidates."""

import ast
import functools
import marshal
import warnings
from typing import Any, cast

from lora_grpo.sandbox.examiner import ASSERTS, Exam
from lora_grpo.sandbox.verdict import BrokenTest, Program


def prepare(program: Program) -> bytes:
    """Compile the tests of a program for the process that runs them.

    Raises:
        BrokenTest: the tests are not Python or assert nothing.
    """
    try:
        return _compile(program.prelude, program.test, program.functions)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenTest(f"the tests of {program.name} cannot run: {type(error).__name__}: {error}") from None


@functools.lru_cache(maxsize=1024)
def _compile(prelude: str, test: str, functions: tuple[str, ...]) -> bytes:
    """Return an `examiner.Exam` in marshal's format, which is fast; the zygotes have the same interpreter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example "assertion is always true"
        tree: Any = ast.parse(test)
        prelude_tree = ast.parse(prelude)
        if not _can_fail(tree) and not _can_fail(prelude_tree):
            raise ValueError("they assert nothing")
        counter = _AssertCounter(tree)
        tree = ast.fix_missing_locations(counter.visit(tree))
        compiled_test = compile(tree, "<test>", "exec", dont_inherit=True)
        compiled_prelude = compile(prelude, "<prelude>", "exec", dont_inherit=True)
    exam = Exam(compiled_prelude, compiled_test, functions, test, counter.number)
    return marshal.dumps(tuple(exam))


def _can_fail(tree: ast.AST) -> bool:
    """Return whether code has an assert, a raise, or a method such as unittest's assertEqual."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assert, ast.Raise)):
            return True
        if isinstance(node, ast.Attribute) and node.attr.startswith("assert"):
            return True
    return False


class _AssertCounter(ast.NodeTransformer):
    """Number the asserts, and run each one even if earlier asserts failed.

    If tests ended at the first failed assert, a further call would tell the candidate that its last answer was correct.

    An assert in a loop counts once. An assert in a `try` or `with` statement is unchanged, because the statement may
    expect its exception. So are the asserts of a function that such a statement uses, or that is an argument, as in
    `assert raises(body)`, and an assert without a name, such as `assert True`.
    """

    catching = (ast.Try, ast.TryStar, ast.With, ast.AsyncWith)

    def __init__(self, tree: ast.Module) -> None:
        self.number = 0
        self._caught_functions: set[str] = set()
        nodes = list(ast.walk(tree))

        # Functions that are an argument: their names occur without a call.
        called_nodes = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if isinstance(node, ast.Name) and id(node) not in called_nodes:
                self._caught_functions.add(node.id)

        # Functions that a `try` or `with` statement uses.
        for node in nodes:
            if isinstance(node, self.catching):
                self._caught_functions |= _names(node)

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, self.catching):
            return node
        if isinstance(node, ast.FunctionDef) and node.name in self._caught_functions:
            return node
        if isinstance(node, ast.Assert) and _names(node.test):
            guard = cast(ast.With, ast.parse(f"with {ASSERTS}[{self.number}]:\n pass").body[0])
            guard.body = [node]
            self.number += 1
            return ast.copy_location(guard, node)
        return self.generic_visit(node)


def _names(tree: ast.AST) -> set[str]:
    """Return the names that a part of the code uses."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
