"""A model learns to find a number from hints, in a game of gem (https://github.com/axon-rl/gem).

Method. GRPO on whole games. agent.py plays gem's GuessTheNumber as gem documents it. The score is 1 if the model says
the number in time, else 0.

    lora-grpo train task.py --preset laptop
"""

import random

from lora_grpo.config import laptop_preset
from lora_grpo.pipeline import run_recipe

AGENT = ["uv", "run", "agent.py"]  # in the folder of this file
PROCESSES = 1
EPISODES_PER_PROCESS = 64
PROMPT_TOKENS = 256

NUMBERS = 5  # in the range of a game
MAX_TURNS = 3


def load(split):
    """Return games with a range of numbers each. No range is in both splits."""
    rows = []
    for seed in range(2000):
        lowest = random.Random(seed).randint(1, 95)
        if (lowest % 5 == 0) == (split == "eval"):
            highest = lowest + NUMBERS - 1
            rows.append({"seed": seed, "min_number": lowest, "max_number": highest, "max_turns": MAX_TURNS})
    return rows


PRESETS = {
    "laptop": laptop_preset(
        model={"max_sequence_tokens": 448},
        data={"task": __file__, "eval_limit": 200},
        sampling={"max_completion_tokens": 180, "max_turn_tokens": 12},
        train={"max_steps": 12},
        eval={"num_samples": 1},
    ),
}

if __name__ == "__main__":
    run_recipe("gem_game", __doc__, PRESETS)
