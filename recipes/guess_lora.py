"""A model learns to find a number from hints, in a conversation of several turns.

Method. The environment thinks of a number from 1 to 20. After each guess it says whether the number is higher or lower.
The reward is 1 for a first guess that is right and 0.1 less for each further guess. Halving the interval finds every
number in at most 5 guesses, and in 3.7 on average. SFT shows reference games of a player who reads the hints but does
not halve; GRPO trains on whole games.

    python recipes/sft_lora.py --task recipes/guess_lora.py --sampling.max-completion-tokens 160 --train.max-steps 100
    python recipes/guess_lora.py --lora.from outputs/sft_lora
"""

import random
import re

from lora_grpo.config import gpu_preset, starter_preset
from lora_grpo.pipeline import run_recipe

HIGHEST, MAX_TURNS = 20, 8
THRESHOLD = 0.1  # every game that is won passes
QUESTION = f"Guess my number from 1 to {HIGHEST}. Answer with one number."


def load(split):
    """Return rows with a number each, and a name that makes games different."""
    games = [f"{split} {n}" for n in range(800 if split == "train" else 400)]
    return [{"question": QUESTION, "game": game, "number": random.Random(game).randint(1, HIGHEST)} for game in games]


class Environment:
    """One game."""

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
    """Return a game whose guesses are possible numbers, at random but not at the ends of the interval."""
    generator, low, high, guesses = random.Random(row["game"]), 1, HIGHEST, []
    while not guesses or guesses[-1] != row["number"]:
        margin = (high - low + 1) // 3
        guess = generator.randint(low + margin, high - margin)
        guesses.append(guess)
        low, high = (guess + 1, high) if guess < row["number"] else (low, guess - 1)
    return [{"role": "assistant", "content": str(guess)} for guess in guesses]


TASK, GAME = {"task": __file__}, {"max_completion_tokens": 160, "max_turn_tokens": 8}
ON_GPU = {"max_completion_tokens": 256, "max_turn_tokens": 16}
PRESETS = {
    "starter": starter_preset(data={**TASK, "eval_limit": 200}, sampling=GAME),
    "8gb": gpu_preset("Qwen/Qwen2.5-0.5B-Instruct", data=TASK, sampling=ON_GPU),
    "12gb": gpu_preset("Qwen/Qwen2.5-1.5B-Instruct", data=TASK, sampling=ON_GPU),
    "16gb": gpu_preset("Qwen/Qwen2.5-1.5B-Instruct", data=TASK, sampling=ON_GPU),
    "24gb": gpu_preset("Qwen/Qwen2.5-3B-Instruct", data=TASK, sampling=ON_GPU),
}

if __name__ == "__main__":
    run_recipe("guess_lora", __doc__, PRESETS)
