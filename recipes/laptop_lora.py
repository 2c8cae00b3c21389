# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""A language model with 135 million parameters learns to read orders, without a GPU (docs/laptop.md).

Method. The base model, SmolLM2-135M-Instruct, never answers in the requested format. A few steps of SFT on reference
answers teach the format. GRPO continues from that adapter; the reward of an answer is the fraction of its fields that
are correct, or 0 if it is not JSON with exactly these fields.

    python recipes/laptop_lora.py --preview                                      # the base model's answers
    python recipes/sft_lora.py --preset laptop --task recipes/laptop_lora.py     # SFT
    python recipes/laptop_lora.py --lora.from outputs/sft_lora                   # GRPO from it
"""

import json
import random

from lora_grpo.config import laptop_preset
from lora_grpo.pipeline import run_recipe

SYSTEM_PROMPT = 'Extract the order as JSON: {"name": "", "city": "", "item": "", "quantity": 0}'
TRAIN_ROWS, EVAL_ROWS = 600, 400
NAMES = "Anna Ben Carla David Elena Felix Grace Hugo Irene Jonas Karin Leo Maria Nils Olga Paul Rosa Simon Tina"
CITIES = "Athens Berlin Boston Cairo Chicago Denver Dublin Helsinki Lima Lisbon Madrid Oslo Paris Prague Rome"
ITEMS = "backpacks baskets blankets bottles candles chairs clocks gloves lamps mugs pillows plates towels"
ONES = "_ one two three four five six seven eight nine ten eleven twelve"
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety"
MESSAGES = (
    "Please send {n} {item} to {name} in {city}.",
    "{name} from {city} would like {n} {item}.",
    "Hi, this is {name}. I need {n} {item} delivered to {city}, thanks!",
    "{n} {item}, please. Ship them to {city}, attention {name}.",
    "{name} in {city} ordered {other_n} {item}. No wait, make that {n}.",
    "{name} moved from {other_city} to {city} and needs {n} {item}.",
    "{name} in {city} returns the {other_item} and takes {n} {item} instead.",
)


def in_words(number):
    """Return a number from 1 to 99 in words, and those from 13 to 19 in digits."""
    ones, tens = ONES.split(), TENS.split()
    if number < 20:
        return ones[number] if number < len(ones) else str(number)
    return tens[number // 10] + (f"-{ones[number % 10]}" if number % 10 else "")


def load(split):
    """Return rows with a message and its order. No message is in both splits."""
    names, cities, items = NAMES.split(), CITIES.split(), ITEMS.split()
    generator, orders = random.Random(0), {}
    while len(orders) < TRAIN_ROWS + EVAL_ROWS:
        name, (city, other_city) = generator.choice(names), generator.sample(cities, 2)
        (item, other_item), (n, other_n) = generator.sample(items, 2), generator.sample(range(2, 100), 2)
        words = {"n": in_words(n), "other_n": in_words(other_n), "name": name, "city": city, "other_city": other_city}
        words |= {"item": item, "other_item": other_item}
        message = generator.choice(MESSAGES).format(**words)
        orders[message[0].upper() + message[1:]] = {"name": name, "city": city, "item": item, "quantity": n}
    rows = [{"question": message, "order": order} for message, order in orders.items()]
    return rows[:TRAIN_ROWS] if split == "train" else rows[TRAIN_ROWS:]


def check(completion, row):
    """Return the fraction of correct fields; 0 if the completion is not a JSON object with exactly these fields."""
    try:
        answer = json.loads(completion)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(answer, dict) or answer.keys() != row["order"].keys():
        return 0.0
    return sum(answer[field] == value for field, value in row["order"].items()) / len(answer)


def gold(row):
    """Return the order as JSON."""
    return json.dumps(row["order"])


def teacher_prompt(row):
    """Return the message with its order, for a teacher that reads more than the model (`--teacher self`)."""
    return f"{row['question']}\nThe order is: {json.dumps(row['order'])}"


PRESETS = {"laptop": laptop_preset(data={"task": __file__, "eval_limit": 150}, train={"max_steps": 10})}
SFT_PRESETS = {
    "laptop": {
        "data": {"eval_limit": 100},
        "train": {
            "max_steps": 5,
            "micro_batch_size": 16,
            "learning_rate": 1e-3,
            "lr_scheduler": "constant",
            "warmup_steps": 0,
        },
    }
}

if __name__ == "__main__":
    run_recipe("laptop_lora", __doc__, PRESETS)
