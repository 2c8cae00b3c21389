# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""Grade-school math with LoRA + GRPO: train, evaluate before and after, save the adapter.

Method. The policy is a frozen base model, in 4 bits (NF4) or in 16 where the GPU has room, with a LoRA adapter on every
linear layer. In each step it samples num_generations answers to each of prompts_per_step problems. The reward of an
answer is the weighted sum of the rewards below, and GRPO raises the probability of answers that score above the mean of
their group. The reward for a correct answer has the largest weight; the others teach the answer format.

    python recipes/gsm8k_lora.py                     # chooses the preset for this machine
    python recipes/gsm8k_lora.py --preset 16gb       # Qwen2.5-1.5B-Instruct on openai/gsm8k
    python recipes/gsm8k_lora.py --plan              # memory and work; downloads no weights
    python recipes/gsm8k_lora.py --dry-run           # settings, one prompt and its rewards; trains nothing
"""

from lora_grpo.config import gpu_preset, laptop_preset, starter_preset
from lora_grpo.pipeline import run_recipe

REWARDS = (
    "correct_answer=2.0",
    "integer_answer=0.5",
    "strict_xml_format=0.5",
    "soft_xml_format=0.5",
    "xml_tag_count=0.5",
)


def gpu(model: str) -> dict:
    return gpu_preset(model, data={"task": "gsm8k", "eval_limit": 500}, rewards=REWARDS, train={"max_steps": 250})


PRESETS = {
    "starter": starter_preset(data={"task": "starter", "eval_limit": 400}, rewards=REWARDS),
    "laptop": laptop_preset(
        model={"bits": 16, "max_sequence_tokens": 512},
        data={"task": "gsm8k", "prompt_style": "hashes", "eval_limit": 200},
        rewards=("correct_answer=1.0", "right_equations=0.5"),
        sampling={"num_generations": 16, "max_completion_tokens": 256},
        train={"max_steps": 40, "prompts_per_step": 8, "micro_batch_size": 4, "learning_rate": 1e-4},
    ),
    "8gb": gpu("Qwen/Qwen2.5-0.5B-Instruct"),
    "12gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "16gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "24gb": gpu("Qwen/Qwen2.5-3B-Instruct"),
}

if __name__ == "__main__":
    run_recipe("gsm8k_lora", __doc__, PRESETS)
