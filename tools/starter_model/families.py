"""Eight families of word problems. Each family returns a question and its 1, 2, or 3 steps.

A family may generate implausible numbers, such as spending more money than available. `problems.draw` drops those.
"""

from __future__ import annotations

import random
from collections.abc import Callable

NAMES = ("Ann", "Ben", "Eva", "Kim", "Leo", "Lena", "Mia", "Omar", "Ravi", "Sam", "Tom", "Zoe")
OBJECTS = ("apples", "balls", "books", "cards", "cups", "pens", "plums", "shells", "stamps", "toys")
PARTS = (("half", 2), ("a third", 3), ("a quarter", 4), ("50%", 2), ("25%", 4), ("20%", 5), ("10%", 10))

Draft = tuple[str, list[tuple[str, int | None, str, int]]]
"""A question and its steps (label, left, operation, right). If left is None, it is the previous result."""


def _buy(r: random.Random, difficulty: int) -> Draft:
    name, (thing, other) = r.choice(NAMES), r.sample(OBJECTS, 2)
    a, p, b, q = r.randint(2, 9), r.randint(2, 12), r.randint(2, 9), r.randint(2, 9)
    ask = f"How much does {name} pay?"
    if difficulty == 1:
        return f"{name} buys {a} {thing} at ${p} each. {ask}", [("Cost", a, "*", p)]
    if difficulty == 2:
        q += r.randint(0, 30)
        return f"{name} buys {a} {thing} at ${p} each and a bag for ${q}. {ask}", [
            ("Cost", a, "*", p),
            ("Total", None, "+", q),
        ]
    return f"{name} buys {a} {thing} at ${p} each and {b} {other} at ${q} each. {ask}", [
        ("Cost", a, "*", p),
        ("Cost", b, "*", q),
        ("Total", a * p, "+", b * q),
    ]


def _change(r: random.Random, difficulty: int) -> Draft:
    name, thing = r.choice(NAMES), r.choice(OBJECTS)
    money, a, p, q = r.randint(10, 99), r.randint(2, 9), r.randint(2, 9), r.randint(2, 20)
    ask = "How much money is left?"
    if difficulty == 1:
        spent = r.randint(3, 90)
        return f"{name} has ${money} and spends ${spent}. {ask}", [("Left", money, "-", spent)]
    if difficulty == 2:
        return f"{name} has ${money} and buys {a} {thing} at ${p} each. {ask}", [
            ("Cost", a, "*", p),
            ("Left", money, "-", a * p),
        ]
    return f"{name} has ${money} and buys {a} {thing} at ${p} each and a bag for ${q}. {ask}", [
        ("Cost", a, "*", p),
        ("Total", None, "+", q),
        ("Left", money, "-", a * p + q),
    ]


def _share(r: random.Random, difficulty: int) -> Draft:
    name, thing, friends, each = r.choice(NAMES), r.choice(OBJECTS), r.randint(2, 9), r.randint(2, 12)
    ask = f"equally among {friends} friends. How many {thing} does each get?"
    if difficulty == 1:
        return f"{name} shares {friends * each} {thing} {ask}", [("Each", friends * each, "/", friends)]
    if difficulty == 2:
        kept = r.randint(2, 20)
        total = friends * each + kept
        return f"{name} has {total} {thing}, keeps {kept} and shares the rest {ask}", [
            ("Left", total, "-", kept),
            ("Each", None, "/", friends),
        ]
    bags, size = r.randint(2, 9), r.randint(3, 12)
    kept = bags * size - friends * each
    return f"{name} has {bags} bags of {size} {thing}, keeps {kept} and shares the rest {ask}", [
        ("Total", bags, "*", size),
        ("Left", None, "-", kept),
        ("Each", None, "/", friends),
    ]


def _rate(r: random.Random, difficulty: int) -> Draft:
    thing, rate, hours, bad = r.choice(OBJECTS), r.randint(2, 12), r.randint(2, 9), r.randint(2, 20)
    if difficulty == 1:
        return f"A machine makes {rate} {thing} an hour. How many {thing} does it make in {hours} hours?", [
            ("Made", rate, "*", hours)
        ]
    if difficulty == 2:
        return (
            f"A machine makes {rate} {thing} an hour for {hours} hours. Then {bad} are lost. How many are left?",
            [("Made", rate, "*", hours), ("Left", None, "-", bad)],
        )
    rate = r.randint(2, 6)
    second = r.randint(2, 6)
    return (
        f"One machine makes {rate} {thing} an hour, another makes {second}. They run {hours} hours and lose {bad}."
        f" How many {thing} are left?",
        [("Rate", rate, "+", second), ("Made", None, "*", hours), ("Left", None, "-", bad)],
    )


def _compare(r: random.Random, difficulty: int) -> Draft:
    (first, second, third), thing = r.sample(NAMES, 3), r.choice(OBJECTS)
    count, gap, times = r.randint(5, 70), r.randint(2, 40), r.randint(2, 5)
    more, sign = r.choice([("more", "+"), ("fewer", "-")])
    start = f"{first} has {count} {thing}. {second} has {gap} {more} than {first}."
    if difficulty == 1:
        return f"{start} How many {thing} does {second} have?", [(second, count, sign, gap)]
    if difficulty == 2:
        return f"{start} How many {thing} do they have together?", [
            (second, count, sign, gap),
            ("Total", None, "+", count),
        ]
    count, gap = r.randint(2, 20), r.randint(2, 30)
    return (
        f"{first} has {count} {thing}. {second} has {times} times as many. {third} has {gap} {more} than {second}."
        f" How many {thing} do {first} and {third} have together?",
        [(second, count, "*", times), (third, None, sign, gap), ("Total", None, "+", count)],
    )


def _boxes(r: random.Random, difficulty: int) -> Draft:
    thing, boxes, size = r.choice(OBJECTS), r.randint(2, 9), r.randint(2, 12)
    name, gone, loose = r.choice(NAMES), r.randint(2, 30), r.randint(2, 30)
    start = f"There are {boxes} boxes with {size} {thing} each"
    if difficulty == 1:
        return f"{start}. How many {thing} are there?", [("Total", boxes, "*", size)]
    if difficulty == 2:
        return f"{start}. {name} takes {gone} {thing}. How many {thing} are left?", [
            ("Total", boxes, "*", size),
            ("Left", None, "-", gone),
        ]
    return f"{start} and {loose} more {thing}. {name} takes {gone} {thing}. How many {thing} are left?", [
        ("Total", boxes, "*", size),
        ("Total", None, "+", loose),
        ("Left", None, "-", gone),
    ]


def _part(r: random.Random, difficulty: int) -> Draft:
    name, thing, (part, divisor) = r.choice(NAMES), r.choice(OBJECTS), r.choice(PARTS)
    total = divisor * r.randint(2, 14)
    if difficulty == 1:
        return f"{name} has {total} {thing} and gives away {part}. How many {thing} does {name} give away?", [
            ("Away", total, "/", divisor)
        ]
    if difficulty == 2:
        return f"{name} has {total} {thing} and gives away {part}. How many {thing} are left?", [
            ("Away", total, "/", divisor),
            ("Left", total, "-", total // divisor),
        ]
    gained = r.randint(2, max(2, total - 2))
    start = f"{name} has {total - gained} {thing}, gets {gained} more and gives away {part}."
    return f"{start} How many {thing} are left?", [
        ("Total", total - gained, "+", gained),
        ("Away", None, "/", divisor),
        ("Left", total, "-", total // divisor),
    ]


def _save(r: random.Random, difficulty: int) -> Draft:
    name, weekly, weeks, start = r.choice(NAMES), r.randint(2, 12), r.randint(2, 9), r.randint(2, 50)
    if difficulty == 1:
        return f"{name} saves ${weekly} a week. How many weeks does it take to save ${weekly * weeks}?", [
            ("Weeks", weekly * weeks, "/", weekly)
        ]
    ask = f"How much money does {name} have after {weeks} weeks?"
    if difficulty == 2:
        return f"{name} has ${start} and saves ${weekly} a week. {ask}", [
            ("Saved", weekly, "*", weeks),
            ("Total", None, "+", start),
        ]
    spent = r.randint(2, 30)
    return f"{name} has ${start}, earns ${weekly + spent} a week and spends ${spent} a week. {ask}", [
        ("Rate", weekly + spent, "-", spent),
        ("Saved", None, "*", weeks),
        ("Total", None, "+", start),
    ]


FAMILIES: dict[str, Callable[[random.Random, int], Draft]] = {
    "buy": _buy,
    "change": _change,
    "share": _share,
    "rate": _rate,
    "compare": _compare,
    "boxes": _boxes,
    "part": _part,
    "save": _save,
}
