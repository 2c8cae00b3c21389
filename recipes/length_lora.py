"""The smallest GRPO run: learn to answer in a given number of characters.

Method. The training rows are prompts without reference answers. There is one reward: it equals 1 at the target length
and decreases with the distance from it. There is no evaluation, because the task has no correct answers; the reward
curve is the result.

    python recipes/length_lora.py --rewards near_length:80
    python recipes/length_lora.py --data.train my_prompts.jsonl
"""

from lora_grpo.config import gpu_preset, starter_preset
from lora_grpo.pipeline import run_recipe

PRESETS = {
    "starter": starter_preset(
        data={"task": "prompts"},
        sampling={"num_generations": 8},
        rewards=("near_length:120",),
        train={"max_steps": 40, "learning_rate": 1e-3, "max_grad_norm": 0.2},
    ),
    "8gb": gpu_preset(
        "Qwen/Qwen2.5-0.5B-Instruct", data={"task": "prompts"}, rewards=("near_length:400",), train={"max_steps": 100}
    ),
}

if __name__ == "__main__":
    run_recipe("length_lora", __doc__, PRESETS)
