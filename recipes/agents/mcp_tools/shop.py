"""The goods of a shop, and questions about them."""

import itertools
import random
from typing import NamedTuple

SYSTEM_PROMPT = "Answer with the tools of the shop. Reply with the number alone."

THINGS = "lamp rug chair table vase clock shelf mirror basket pillow kettle bowl mug tray bench stool"
COLORS = "red blue green white black yellow brown gray pink orange"
NUM_TRAIN_COLORS = 7


class Stock(NamedTuple):
    """What the shop knows of an item."""

    price: int
    pieces: int


def make_goods():
    """Return the stock of each item, such as "red lamp"."""
    generator = random.Random(0)
    goods = {}
    for color, thing in itertools.product(COLORS.split(), THINGS.split()):
        goods[f"{color} {thing}"] = Stock(price=generator.randint(3, 40), pieces=generator.randint(3, 40))
    return goods


GOODS = make_goods()


def load(split):
    """Return questions about one item or two. The items of "train" and "eval" have different colors."""
    num_train = NUM_TRAIN_COLORS * len(THINGS.split())
    items = list(GOODS)
    items = items[:num_train] if split == "train" else items[num_train:]
    generator = random.Random(split)
    rows = []
    for item in items:
        rows.append(make_row(f"What does a {item} cost?", [("price", item)], GOODS[item].price))
        rows.append(make_row(f"How many pieces of the {item} are left?", [("pieces", item)], GOODS[item].pieces))
    for first, second in generator.sample(list(itertools.combinations(items, 2)), 2 * len(items)):
        question = f"What do a {first} and a {second} cost together?"
        total = GOODS[first].price + GOODS[second].price
        rows.append(make_row(question, [("price", first), ("price", second)], total))
    generator.shuffle(rows)
    return rows


def make_row(question, calls, answer):
    """Return a question, the calls of tools that answer it, and the answer."""
    return {"question": question, "calls": calls, "answer": str(answer)}
