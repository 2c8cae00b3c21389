"""Sixteen families of code problems. Each family describes the result of a tiny function and writes its body.

The parameters are `{x}` and `{y}`. `code_problems.draw` chooses their names.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

COMPARISONS = (
    ("greater than", ">"),
    ("less than", "<"),
    ("at least", ">="),
    ("at most", "<="),
)
WORDS = ("cat", "dog", "end", "go", "hey", "ok", "red", "sun", "top", "yes")
AGGREGATES = (
    ("the sum of {x}", "sum({x})"),
    ("the largest of {x}", "max({x})"),
    ("the smallest of {x}", "min({x})"),
    ("the length of {x}", "len({x})"),
)


@dataclass(frozen=True)
class Draft:
    """A function without a name or parameter names."""

    kind: str
    """The kind of its parameters and result, a key of `code_problems.NAMES`."""
    what: str
    """The result in words."""
    body: str
    """The source below the `def` line, without indentation."""
    edges: tuple[tuple[object, ...], ...]
    """Arguments that expose common mistakes: values next to the constants."""


def _around(*numbers: int) -> tuple[tuple[object, ...], ...]:
    return tuple((number + offset,) for number in numbers for offset in (-1, 0, 1))


def _shift(r: random.Random) -> Draft:
    a = r.randint(2, 60)
    what, body = r.choice(
        [
            (f"{{x}} plus {a}", f"{{x}} + {a}"),
            (f"{{x}} minus {a}", f"{{x}} - {a}"),
            (f"{a} minus {{x}}", f"{a} - {{x}}"),
        ]
    )
    return Draft("number", what, f"return {body}", ((0,), (a,)))


def _linear(r: random.Random) -> Draft:
    a, b, (word, sign) = r.randint(2, 12), r.randint(1, 30), r.choice([("plus", "+"), ("minus", "-")])
    return Draft("number", f"{{x}} times {a} {word} {b}", f"return {{x}} * {a} {sign} {b}", ((0,), (1,)))


def _divide(r: random.Random) -> Draft:
    a = r.randint(2, 40)
    what, sign = r.choice([("{x} divided by {a}, rounded down", "//"), ("the remainder of {x} divided by {a}", "%")])
    return Draft("number", what.replace("{a}", str(a)), f"return {{x}} {sign} {a}", ((0,), *_around(a)))


def _compare(r: random.Random) -> Draft:
    a, (word, sign) = r.randint(2, 60), r.choice(COMPARISONS)
    return Draft("truth", f"whether {{x}} is {word} {a}", f"return {{x}} {sign} {a}", _around(a))


def _between(r: random.Random) -> Draft:
    a = r.randint(1, 40)
    b = a + r.randint(3, 20)
    return Draft(
        "truth", f"whether {{x}} is at least {a} and at most {b}", f"return {a} <= {{x}} <= {b}", _around(a, b)
    )


def _multiple(r: random.Random) -> Draft:
    a = r.randint(2, 20)
    b = r.randrange(a)
    if r.random() < 0.5:
        a = r.randint(2, 40)
        no, sign = r.choice([("", "=="), ("not ", "!=")])
        return Draft("truth", f"whether {{x}} is {no}a multiple of {a}", f"return {{x}} % {a} {sign} 0", _around(0, a))
    what = f"whether {{x}} divided by {a} leaves remainder {b}"
    return Draft("truth", what, f"return {{x}} % {a} == {b}", _around(b, a + b))


def _limit(r: random.Random) -> Draft:
    a, (word, name) = r.randint(2, 60), r.choice([("smaller", "min"), ("larger", "max")])
    return Draft("number", f"the {word} of {{x}} and {a}", f"return {name}({{x}}, {a})", _around(a))


def _branch(r: random.Random) -> Draft:
    a, b, c, (word, sign) = r.randint(2, 30), r.randint(2, 30), r.randint(2, 30), r.choice(COMPARISONS)
    return Draft(
        "number",
        f"{{x}} plus {b} if {{x}} is {word} {a}, else {{x}} minus {c}",
        f"if {{x}} {sign} {a}:\n    return {{x}} + {b}\nreturn {{x}} - {c}",
        _around(a),
    )


def _pair(r: random.Random) -> Draft:
    a = r.randint(2, 40)
    what, body = r.choice(
        [
            (f"{{x}} minus {{y}} plus {a}", f"{{x}} - {{y}} + {a}"),
            (f"{{x}} times {a} plus {{y}}", f"{{x}} * {a} + {{y}}"),
            (f"{{x}} plus {{y}} times {a}", f"{{x}} + {{y}} * {a}"),
        ]
    )
    return Draft("two numbers", what, f"return {body}", ((0, 0), (3, 8)))


def _exceed(r: random.Random) -> Draft:
    a, (word, sign) = r.randint(2, 40), r.choice(COMPARISONS)
    extra, plus = r.choice([("plus", "+"), ("minus", "-")])
    meet = 10 + a if plus == "+" else 10 - a
    return Draft(
        "two numbers",
        f"whether {{x}} is {word} {{y}} {extra} {a}",
        f"return {{x}} {sign} {{y}} {plus} {a}",
        tuple((meet + offset, 10) for offset in (-1, 0, 1)),
    )


def _ends(r: random.Random) -> Draft:
    n = r.randint(2, 15)
    what, part = r.choice(
        [
            (f"the first {n} of {{x}}", f":{n}"),
            (f"the last {n} of {{x}}", f"-{n}:"),
            (f"{{x}} without the first {n}", f"{n}:"),
            (f"{{x}} without the last {n}", f":-{n}"),
        ]
    )
    return Draft("list", what, f"return {{x}}[{part}]", (([],), ([r.randint(0, 9) + 10 * k for k in range(n + 3)],)))


def _every(r: random.Random) -> Draft:
    a, (word, sign) = r.randint(2, 40), r.choice([("plus", "+"), ("minus", "-"), ("times", "*")])
    return Draft("list", f"a list of each of {{x}} {word} {a}", f"return [v {sign} {a} for v in {{x}}]", (([],),))


def _keep(r: random.Random) -> Draft:
    a, (word, sign) = r.randint(2, 40), r.choice(COMPARISONS)
    what = f"a list of those of {{x}} that are {word} {a}"
    return Draft("list", what, f"return [v for v in {{x}} if v {sign} {a}]", (([],), ([a - 1, a, a + 1],)))


def _count(r: random.Random) -> Draft:
    a, (word, sign) = r.randint(2, 40), r.choice(COMPARISONS)
    edges: tuple[tuple[object, ...], ...] = ([],), ([a - 1, a - 1, a, a + 1],), ([a],), ([a - 1, a + 1, a + 1],)
    return Draft(
        "measure", f"how many of {{x}} are {word} {a}", f"return len([v for v in {{x}} if v {sign} {a}])", edges
    )


def _total(r: random.Random) -> Draft:
    a, (whole, call) = r.randint(2, 40), r.choice(AGGREGATES)
    word, sign = r.choice([("plus", "+"), ("minus", "-"), ("times", "*")])
    return Draft("measure", f"{whole} {word} {a}", f"return {call} {sign} {a}", (([4, 1, 9],),))


def _text(r: random.Random) -> Draft:
    word, times = r.choice(WORDS), r.randint(2, 20)
    what, value = r.choice(
        [
            ("{x}", "{x}"),
            ("{x} in upper case", "{x}.upper()"),
            ("{x} reversed", "{x}[::-1]"),
            ("{x} in lower case", "{x}.lower()"),
        ]
    )
    what, body = r.choice(
        [
            (f"{what}, then '{word}'", f"{value} + '{word}'"),
            (f"'{word}', then {what}", f"'{word}' + {value}"),
            (f"{what}, {times} times", f"{value} * {times}"),
        ]
    )
    return Draft("text", what, f"return {body}", (("",), ("Hello you",)))


FAMILIES: dict[str, Callable[[random.Random], Draft]] = {
    "shift": _shift,
    "linear": _linear,
    "divide": _divide,
    "compare": _compare,
    "between": _between,
    "multiple": _multiple,
    "limit": _limit,
    "branch": _branch,
    "pair": _pair,
    "exceed": _exceed,
    "ends": _ends,
    "every": _every,
    "keep": _keep,
    "count": _count,
    "total": _total,
    "text": _text,
}
