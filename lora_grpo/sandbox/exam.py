"""Compile and check tests in the trusted process, once for all candidates."""

from __future__ import annotations

import ast
import builtins
import functools
import marshal
import symtable
import warnings
from types import CodeType
from typing import Any, cast

from lora_grpo.sandbox.examiner import ERROR, FAILED, HELD
from lora_grpo.sandbox.verdict import BrokenTest, Program

_BUILTINS = frozenset(dir(builtins))


@functools.lru_cache(maxsize=1024)
def _compiled(
    prelude: str, test: str, functions: tuple[str, ...]
) -> tuple[CodeType, CodeType, CodeType, set[str], int]:
    """Return the code of the prelude, the test's imports, and the test; undefined names; number of counted asserts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example "assertion is always true"
        tree: Any = ast.parse(test)
        counted = _Counted(tree)
        tree = ast.fix_missing_locations(counted.visit(tree))
        imports = ast.Module([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
        if not any(map(_asserts, (*ast.walk(tree), *ast.walk(ast.parse(prelude))))):
            raise ValueError("they assert nothing")
        used, defined = _names(test)
        unknown = used - defined - _names(prelude)[1] - _BUILTINS - set(functions)
        if "import *" in prelude + test:
            unknown = set()  # checked at run time
        return (
            compile(prelude, "<prelude>", "exec", dont_inherit=True),
            compile(imports, "<test>", "exec", dont_inherit=True),
            compile(tree, "<test>", "exec", dont_inherit=True),
            unknown,
            counted.number,
        )


def prepare(program: Program) -> bytes:
    """Compile the tests of a program for the process that runs them.

    Raises:
        BrokenTest: the tests are not Python, assert nothing, or use an undefined name, which a candidate could define,
            such as `np` if the import for `np.allclose(result, expected)` is missing.
    """
    try:
        prelude, imports, test, unknown, number = _compiled(program.prelude, program.test, program.functions)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenTest(f"the tests of {program.name} cannot run: {type(error).__name__}: {error}") from None
    if unknown:
        raise BrokenTest(
            f"the tests of {program.name} cannot run: they use {', '.join(sorted(unknown))}, which they do not define; "
            f"the candidate defines {', '.join(program.functions) or 'nothing'}"
        )
    # marshal is fast. It requires the same interpreter, which the zygotes use.
    return marshal.dumps((prelude, imports, test, list(program.functions), program.test, number))


def _asserts(node: ast.AST) -> bool:
    """Return whether a node can make a test fail: an assert, a raise, or a method such as unittest's assertEqual."""
    return isinstance(node, (ast.Assert, ast.Raise)) or (isinstance(node, ast.Attribute) and node.attr[:6] == "assert")


def _names(source: str) -> tuple[set[str], set[str]]:
    """Return the global names that a program uses and those that it defines."""
    used: set[str] = set()
    defined: set[str] = set()
    tables = [symtable.symtable(source, "<test>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                if top or symbol.is_declared_global():
                    defined.add(symbol.get_name())
            elif symbol.is_referenced() and (top or symbol.is_global()):
                used.add(symbol.get_name())
    return used, defined | {"__name__"}


_CATCHING = (ast.Try, ast.TryStar, ast.With, ast.AsyncWith)


class _Counted(ast.NodeTransformer):
    """Number the asserts, and run each one even if earlier asserts failed.

    If tests ended at the first failed assert, a further call would tell the candidate that its last answer was right.

    An assert in a loop counts once. The functions named by `HELD` and `FAILED` are called each time it runs. An assert
    in a `try` or `with` statement is unchanged, because the statement may expect its exception. So are the asserts of a
    function that such a statement uses, or that is an argument, as in `assert raises(body)`.
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
        """Wrap the assert in a try statement. An assert without a name, such as `assert True`, is unchanged."""
        if not any(isinstance(part, ast.Name) for part in ast.walk(node.test)):
            return node
        number, self.number = self.number, self.number + 1
        guarded = ast.parse(
            f"try:\n pass\nexcept BaseException as {ERROR}:\n {FAILED}({number}, {ERROR})\nelse:\n {HELD}({number})"
        ).body[0]
        assert isinstance(guarded, ast.Try)
        guarded.body = [node]
        return ast.copy_location(guarded, node)
