# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""Competition mathematics with LoRA + GRPO: train on MATH, evaluate on MATH-500.

Method. As in gsm8k_lora.py, with one reward: 1 if the answer in the last `\\boxed{}` is equal to the reference, else 0.
math-verify decides what is equal, so that fractions, roots, sets and intervals count in any form. Solutions are longer
than those of GSM8K, so completions have up to 1,024 tokens.

    python recipes/math_lora.py --preset 16gb        # Qwen2.5-1.5B-Instruct
    python recipes/math_lora.py --preset 16gb --data.train my_problems.jsonl
    lora-grpo evaluate outputs/math_lora --task aime24 --num-samples 32 --k 1 8
"""

from lora_grpo.config import gpu_preset
from lora_grpo.pipeline import run_recipe


def gpu(model: str) -> dict:
    return gpu_preset(
        model,
        model={"max_sequence_tokens": 2048},
        data={"task": "math", "prompt_style": "boxed", "eval_limit": 500},
        sampling={"max_completion_tokens": 1024},
        rewards=("correct_answer=1.0",),
        train={"max_steps": 250},
    )


PRESETS = {
    "8gb": gpu("Qwen/Qwen2.5-0.5B-Instruct"),
    "12gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "16gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "24gb": gpu("Qwen/Qwen2.5-3B-Instruct"),
}

if __name__ == "__main__":
    run_recipe("math_lora", __doc__, PRESETS)
