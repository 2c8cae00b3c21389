"""Grade-school maths with LoRA + GRPO: train, evaluate before and after, keep the adapter.

Method. The policy is a frozen 4-bit (NF4) base with a LoRA adapter on every linear layer. At each step it answers
prompts_per_step problems num_generations times; an answer earns the sum of the rewards below; GRPO raises the
probability of what earned more than the other answers to the same problem. The reward of a correct answer dominates;
the smaller ones teach the format that the grader reads.

    python recipes/gsm8k_lora.py                     # preset chosen from the hardware
    python recipes/gsm8k_lora.py --preset 16gb       # Qwen2.5-1.5B-Instruct on openai/gsm8k
    python recipes/gsm8k_lora.py --plan              # memory, work and time, before anything is downloaded
    python recipes/gsm8k_lora.py --dry-run           # what would run; trains nothing
"""

from lora_grpo.config import gpu_preset, starter_preset
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
    "8gb": gpu("Qwen/Qwen2.5-0.5B-Instruct"),
    "12gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "16gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "24gb": gpu("Qwen/Qwen2.5-3B-Instruct"),
}

if __name__ == "__main__":
    run_recipe("gsm8k_lora", __doc__, PRESETS)
