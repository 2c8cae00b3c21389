"""A model learns to find a number from hints, in a conversation of several turns.

Method. The environment thinks of a number from 1 to 20. After each guess it says whether the number is higher or lower,
and GRPO trains on whole games: the reward is 1 for a guess that is right at once, less for each further turn, and 0
without a right guess. Halving the interval finds every number in at most 5 guesses, in 3.7 on average.

    python recipes/sft_lora.py --task recipes/guess_lora.py    # first: how to play, from reference games
    python recipes/guess_lora.py --lora.from outputs/sft_lora
"""

import random
import re

from lora_grpo.config import starter_preset
from lora_grpo.pipeline import run_recipe

HIGHEST, MAX_TURNS = 20, 8
THRESHOLD = 0.1  # every game that is won passes
QUESTION = f"Guess my number from 1 to {HIGHEST}. Answer with one number."


def load(split):
    """Return rows with a number each, and a name that makes games different."""
    games = [f"{split} {n}" for n in range(800 if split == "train" else 400)]
    return [{"question": QUESTION, "game": game, "number": random.Random(game).randint(1, HIGHEST)} for game in games]


class Environment:
    """A game. The reward falls by 0.1 with each guess after the first."""

    def reset(self, number, **row):
        self.number, self.guesses, self.found = number, 0, False

    def reply(self, text):
        self.guesses += 1
        guess = re.fullmatch(r"\s*(\d{1,3})\s*", text)
        self.found = guess is not None and int(guess[1]) == self.number
        if self.found:
            return None
        return "One number." if guess is None else "Higher." if int(guess[1]) < self.number else "Lower."

    def get_reward(self):
        return 1.1 - 0.1 * self.guesses if self.found else 0.0


def gold(row):
    """Return a game of a player who reads the hints but does not halve the interval: any number that is possible."""
    generator, low, high, guesses = random.Random(row["game"]), 1, HIGHEST, []
    while not guesses or guesses[-1] != row["number"]:
        guess = generator.randint(low, high)
        guesses.append(guess)
        low, high = (guess + 1, high) if guess < row["number"] else (low, guess - 1)
    return [{"role": "assistant", "content": str(guess)} for guess in guesses]


GAME = {"max_completion_tokens": 160, "max_turn_tokens": 8}
PRESETS = {"starter": starter_preset(data={"task": __file__}, sampling=GAME)}

if __name__ == "__main__":
    run_recipe("guess_lora", __doc__, PRESETS)
