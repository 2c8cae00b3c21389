# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""A model learns to find a number from hints, in a conversation of several turns.

Method. The environment thinks of a number from 1 to 20. After each guess, it says whether the number is higher or
lower. The reward is 1 if the first guess is right, and 0.1 less for each further guess. Bisection finds every number in
at most 5 guesses, and in 3.7 on average. SFT trains on reference games of a player who follows the hints but does not
bisect; GRPO trains on whole games.

    python recipes/sft_lora.py --task recipes/guess_lora.py --sampling.max-completion-tokens 160 --train.max-steps 100
    python recipes/guess_lora.py --lora.from outputs/sft_lora
"""

import random
import re

from lora_grpo.config import gpu_preset, starter_preset
from lora_grpo.pipeline import run_recipe

HIGHEST = 20
MAX_TURNS = 8
THRESHOLD = 0.1  # every game that is won passes
QUESTION = f"Guess my number from 1 to {HIGHEST}. Answer with one number."


def load(split):
    """Return rows with a number each, and a name that makes games different."""
    rows = []
    for index in range(800 if split == "train" else 400):
        game = f"{split} {index}"
        rows.append({"question": QUESTION, "game": game, "number": random.Random(game).randint(1, HIGHEST)})
    return rows


class Environment:
    """One game."""

    def reset(self, number, **row):
        self.number = number
        self.guesses = 0
        self.is_won = False

    def reply(self, text):
        self.guesses += 1
        answer = re.fullmatch(r"\s*(\d{1,3})\s*", text)
        if answer is None:
            return "One number."
        guess = int(answer[1])
        if guess < self.number:
            return "Higher."
        if guess > self.number:
            return "Lower."
        self.is_won = True
        return None

    def get_reward(self):
        return 1.1 - 0.1 * self.guesses if self.is_won else 0.0


def gold(row):
    """Return a game whose guesses are possible numbers, at random but not at the ends of the interval."""
    generator = random.Random(row["game"])
    low, high = 1, HIGHEST
    guesses = []
    while row["number"] not in guesses:
        margin = (high - low + 1) // 3
        guess = generator.randint(low + margin, high - margin)
        guesses.append(guess)
        if guess < row["number"]:
            low = guess + 1
        else:
            high = guess - 1
    return [{"role": "assistant", "content": str(guess)} for guess in guesses]


TASK = {"task": __file__}
ON_CPU = {"max_completion_tokens": 160, "max_turn_tokens": 8}
ON_GPU = {"max_completion_tokens": 256, "max_turn_tokens": 16}
PRESETS = {
    "starter": starter_preset(data={**TASK, "eval_limit": 200}, sampling=ON_CPU),
    "8gb": gpu_preset("Qwen/Qwen2.5-0.5B-Instruct", data=TASK, sampling=ON_GPU),
    "12gb": gpu_preset("Qwen/Qwen2.5-1.5B-Instruct", data=TASK, sampling=ON_GPU),
    "16gb": gpu_preset("Qwen/Qwen2.5-1.5B-Instruct", data=TASK, sampling=ON_GPU),
    "24gb": gpu_preset("Qwen/Qwen2.5-3B-Instruct", data=TASK, sampling=ON_GPU),
}

if __name__ == "__main__":
    run_recipe("guess_lora", __doc__, PRESETS)
