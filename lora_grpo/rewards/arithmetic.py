"""Equations of numbers in a text, such as `3 * 4 = 12` or `$48/2 = $24`, and whether they hold.

An equation has a result, the number after its equals sign, and before the sign an expression of numbers with at least
one operator. In the chain `2 * 3 = 6 + 4 = 10`, as people write sums on paper, 6 and 10 are results. An expression with
words in it, such as `5 apples * 2`, is not read.
"""

import ast
import math
import operator
import re
from collections.abc import Iterator

_NUMBER = r"-?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)"
_RESULT = re.compile(rf"\s*\$?\s*({_NUMBER})(?:/([0-9]{{1,15}}))?(%?)")
"""The number or the fraction after an equals sign."""
_EXPRESSION = re.compile(r"[-+*/x×÷()$%.,0-9 ]*$")
"""The characters before an equals sign that may belong to its expression."""
_LONGEST_EXPRESSION = 100
"""Maximum number of characters of an expression."""
_BULLET = re.compile(r"^[ \t]*[-*+•][ \t]+", re.M)
"""The beginning of an item of a list, whose dash is no minus."""
_PERCENT = re.compile(r"([0-9.]+)%")
_TIMES = re.compile(r"(?<=[0-9)])\s*[x×]\s*(?=[0-9(.])")
_OPERATION = re.compile(r"[0-9).%]\s*[-+*/]")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def equations(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each equation of numbers in a text, without spaces, and whether it holds.

    An equation holds if its result is the value of the expression, or that value rounded to the result's decimals. An
    integer must be exact.
    """
    text = _BULLET.sub("", text)
    end_of_last = 0
    for sign in re.finditer(r"(?<![=<>!])=(?!=)", text):
        before = text[max(end_of_last, sign.start() - _LONGEST_EXPRESSION) : sign.start()]
        end_of_last = sign.end()
        result = _RESULT.match(text, sign.end())
        calculation = _value(before)
        if result is None or calculation is None:
            continue
        expression, value = calculation
        yield f"{expression}={result[0]}".replace(" ", ""), _is_stated(value, *result.groups())


def _is_stated(value: float, number: str, denominator: str | None, percent: str) -> bool:
    """Return whether a value is the stated number or fraction, up to the rounding of its last decimal."""
    digits = number.replace(",", "")
    decimals = len(digits.partition(".")[2])
    unit = 0.01 if percent else 1.0
    if denominator is not None:
        unit /= int(denominator) or math.nan
    rounding = 0.5 * 10**-decimals * unit if decimals else 0.0
    return math.isclose(value, float(digits) * unit, rel_tol=1e-9, abs_tol=rounding + 1e-9)


def _value(text: str) -> tuple[str, float] | None:
    """Return the expression at the end of a text and its value, or None if there is none; NaN if it divides by 0."""
    characters = _EXPRESSION.search(text)
    assert characters  # they may be none
    if len(characters[0]) == _LONGEST_EXPRESSION:  # its beginning is unknown
        return None
    expression = re.split(r"[.,]\s", characters[0])[-1].strip()
    code = expression.replace("$", "").replace(",", "").replace("÷", "/")
    code = _TIMES.sub("*", code)
    if not _OPERATION.search(code):
        return None
    code = _PERCENT.sub(r"(\1/100)", code)
    try:
        value = _evaluate(ast.parse(code.strip(), mode="eval").body)
    except ZeroDivisionError:
        value = math.nan
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError):
        return None
    return expression, value


def _evaluate(node: ast.AST) -> float:
    """Return the value of a tree of numbers and the operators + - * /, or raise TypeError for any other."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
        return _evaluate(node.operand)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    raise TypeError(f"no arithmetic: {type(node).__name__}")
