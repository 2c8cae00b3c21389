# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""Your own task in one file: rows, prompts, and a check. Copy this file and change it.

This example teaches a model to show its work. A completion is correct if each calculation in it is correct (14+28=42)
and together they use every number of the question. It also shows partial credit: the score is the fraction of correct
calculations, and a completion passes with a score of 1.

    python recipes/your_task.py                        # train on the bundled problems, evaluate before and after
    python recipes/your_task.py --preview              # can the base model learn this? trains nothing
    python recipes/your_task.py --task my_task.py      # the same with your file

The functions below are all that a task needs. docs/your-task.md explains each of them.
"""

import re

from lora_grpo.config import gpu_preset, laptop_preset, starter_preset
from lora_grpo.pipeline import run_recipe
from lora_grpo.starter import problems

SYSTEM_PROMPT = "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
CALCULATION = re.compile(r"(?<!\d)(\d{1,9})([-+*/])(\d{1,9})=(\d{1,9})(?!\.?\d)")
AUDIT_IGNORE = ("all answers at once",)  # text after a calculation is fine; see docs/your-task.md
HOLDS = {
    "+": lambda a, b, result: a + b == result,
    "-": lambda a, b, result: a - b == result,
    "*": lambda a, b, result: a * b == result,
    "/": lambda a, b, result: b != 0 and a == b * result,
}


def load(split):
    """Return the rows of the split "train" or "eval". Each row needs a question."""
    return [{"question": row["question"]} for row in problems("starter", split)]


def check(completion, row):
    """Return the fraction of correct calculations; 0 if they do not use every number of the question."""
    calculations = CALCULATION.findall(completion)
    used = set()
    for first, _, second, _ in calculations:
        used |= {first, second}
    if not calculations or not used.issuperset(numbers(row)):
        return 0.0
    are_correct = [HOLDS[sign](int(a), int(b), int(result)) for a, sign, b, result in calculations]
    return sum(are_correct) / len(are_correct)


def gold(row):
    """Return a completion that `check` accepts."""
    return "\n".join(f"{number}+0={number}" for number in dict.fromkeys(numbers(row)))


def numbers(row):
    """Return the whole numbers of a question. A percentage becomes a division, so its number need not appear."""
    return re.findall(r"\b\d+\b(?!%)", row["question"])


def gpu(model: str) -> dict:
    return gpu_preset(model, data={"task": __file__, "eval_limit": 200})


PRESETS = {
    "starter": starter_preset(data={"task": __file__, "eval_limit": 200}),
    "laptop": laptop_preset(data={"task": __file__, "eval_limit": 100}, train={"max_steps": 30}),
    "8gb": gpu("Qwen/Qwen2.5-0.5B-Instruct"),
    "12gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "16gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "24gb": gpu("Qwen/Qwen2.5-3B-Instruct"),
}
# SFT on the completions of `gold`, before GRPO: lora-grpo train sft --preset laptop --task FILE
SFT_PRESETS = {
    "laptop": {"data": {"eval_limit": 100}, "train": {"max_steps": 20, "micro_batch_size": 16, "warmup_steps": 2}}
}

if __name__ == "__main__":
    run_recipe("your_task", __doc__, PRESETS)
