# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""A minimal GRPO run: learn to answer in a given number of characters.

Method. The reward equals 1 at the target length and decreases with the distance from it. An answer passes if its length
is within 10% of the target. The rows are prompts without reference answers: only the length of a completion counts.

    python recipes/length_lora.py
    python recipes/length_lora.py --data.train my_prompts.jsonl --data.eval other_prompts.jsonl
"""

from lora_grpo.config import gpu_preset, starter_preset
from lora_grpo.pipeline import run_recipe
from lora_grpo.starter import problems
from lora_grpo.tasks import read_rows

CHARACTERS = 80  # about 40 tokens: answers that are cut off at the limit of 64 tokens must not have this length
THRESHOLD = 0.9


def load(split, source=None):
    """Return the bundled questions, or the rows of a file or Hub dataset, which have a column "prompt"."""
    if source is None:
        return [{"prompt": row["question"]} for row in problems("starter", split)]
    return read_rows(source, split)


def prompt(row):
    """Return the column "prompt", also of rows that have a "question"."""
    return row["prompt"]


def check(completion, row):
    """Return a score from 0 to 1 for the distance from the target length."""
    return max(0.0, 1 - abs(len(completion) - CHARACTERS) / CHARACTERS)


def gold(row):
    """Return a completion of the target length."""
    return "." * CHARACTERS


PRESETS = {
    "starter": starter_preset(
        data={"task": __file__, "eval_limit": 200},
        sampling={"num_generations": 8},
        train={"max_steps": 40, "learning_rate": 1e-3, "max_grad_norm": 0.2},
    ),
    "8gb": gpu_preset(
        "Qwen/Qwen2.5-0.5B-Instruct", data={"task": __file__, "eval_limit": 200}, train={"max_steps": 100}
    ),
}

if __name__ == "__main__":
    run_recipe("length_lora", __doc__, PRESETS)
