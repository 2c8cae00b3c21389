"""Python functions with LoRA + GRPO: the reward runs unit tests in a sandbox; train, evaluate before and after.

Method. The policy is a frozen 4-bit (NF4) base with a LoRA adapter on every linear layer. At each step it writes
num_generations programs for each of prompts_per_step problems; a program earns 1 if all of its problem's unit tests
pass and 0 if not, and GRPO raises the probability of the programs that did better than the others of their group.
Programs run where they can reach neither the tests that judge them nor anything of yours (lora_grpo/sandbox).

    python recipes/code_lora.py                      # preset chosen from the hardware
    python recipes/code_lora.py --preset 12gb        # Qwen2.5-Coder-1.5B-Instruct: from MBPP to HumanEval
    python recipes/code_lora.py --dry-run            # what would run; trains nothing
"""

from lora_grpo.config import gpu_preset, starter_preset
from lora_grpo.pipeline import run_recipe

REWARDS = ("passes_tests=1.0",)


def gpu(model: str) -> dict:
    return gpu_preset(
        model,
        model={"max_sequence_tokens": 1280},
        data={"task": "mbpp", "eval_task": "humaneval", "prompt_style": "code"},
        sampling={"num_generations": 16},
        rewards=REWARDS,
        train={"max_steps": 150},
        eval={"num_samples": 10, "k": (1, 10)},
    )


PRESETS = {
    "starter": starter_preset(
        data={"task": "starter-code", "eval_limit": 400, "prompt_style": "code"},
        sampling={"max_completion_tokens": 56},
        rewards=REWARDS,
    ),
    "8gb": gpu("Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    "12gb": gpu("Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    "16gb": gpu("Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    "24gb": gpu("Qwen/Qwen2.5-Coder-3B-Instruct"),
}

if __name__ == "__main__":
    run_recipe("code_lora", __doc__, PRESETS)
