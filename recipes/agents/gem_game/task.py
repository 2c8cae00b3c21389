"""A model learns to find a number from hints, in a game of gem (https://github.com/axon-rl/gem).

Method. GRPO on whole games. agent.py plays gem's GuessTheNumber with three numbers and two guesses, after one example.
A player who first guesses the middle number and then follows the hint always wins. Two different guesses that ignore
the hint win two games of three. The score is 1 for a game that is won, else 0.

    lora-grpo train task.py --preset laptop
"""

import random

from lora_grpo.config import laptop_preset
from lora_grpo.pipeline import run_recipe

AGENT = ["uv", "run", "agent.py"]  # in the folder of this file
PROCESSES = 1
EPISODES_PER_PROCESS = 64
PROMPT_TOKENS = 128

NUMBERS = 3  # to choose from
MAX_TURNS = 2


def load(split):
    """Return games. No range of numbers is in both splits."""
    rows = []
    for seed in range(2000):
        # Not drawn from the seed itself: gem draws the hidden number from it, which would then follow from the range.
        lowest = random.Random(f"range {seed}").randint(1, 97)
        if (lowest % 5 == 0) == (split == "eval"):
            settings = {"min_number": lowest, "max_number": lowest + NUMBERS - 1, "max_turns": MAX_TURNS}
            rows.append({"seed": seed, "settings": settings})
    return rows


PRESETS = {
    "laptop": laptop_preset(
        model={"max_sequence_tokens": 192},
        data={"task": __file__, "eval_limit": 200},
        sampling={"max_completion_tokens": 64, "max_turn_tokens": 8},
        train={"max_steps": 20, "learning_rate": 1e-4},
        eval={"num_samples": 1},
    ),
}

if __name__ == "__main__":
    run_recipe("gem_game", __doc__, PRESETS)
