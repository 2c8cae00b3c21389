# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""Warm-up for GRPO: supervised fine-tuning (SFT) on the task's reference answers, with TRL's SFTTrainer.

Method. GRPO learns from sampled answers, so it cannot start if the base model never answers correctly. SFT trains on
reference answers instead: each step raises the probability of the reference answers of prompts_per_step problems, given
the prompt that evaluation uses. The loss is the mean over the tokens of the answers. GRPO then continues from the
adapter.

    python recipes/sft_lora.py                                   # chooses the preset for this machine
    python recipes/sft_lora.py --task my_task.py                 # the gold(row) of your file; see docs/your-task.md
    python recipes/gsm8k_lora.py --lora.from outputs/sft_lora    # then GRPO, from the same adapter
    python recipes/sft_lora.py --dry-run                         # settings, one prompt and answer; trains nothing
"""

from lora_grpo.config import gpu_preset, laptop_preset, starter_preset
from lora_grpo.pipeline import run_recipe

METHOD = "sft"
TRAIN = {"max_steps": 60, "prompts_per_step": 16, "max_grad_norm": 1.0}


def gpu(model: str) -> dict:
    return gpu_preset(model, data={"task": "gsm8k", "eval_limit": 500}, train={**TRAIN, "learning_rate": 2e-4})


PRESETS = {
    "starter": starter_preset(
        data={"task": "starter", "eval_limit": 400}, train={**TRAIN, "micro_batch_size": 16, "learning_rate": 2e-3}
    ),
    "laptop": laptop_preset(
        model={"bits": 16, "max_sequence_tokens": 512},
        data={"task": "gsm8k", "prompt_style": "hashes", "eval_limit": 200},
        sampling={"max_completion_tokens": 256},
        train={
            "max_steps": 120,
            "prompts_per_step": 16,
            "micro_batch_size": 4,
            "learning_rate": 1e-3,
            "lr_scheduler": "cosine",
            "warmup_steps": 8,
        },
    ),
    "8gb": gpu("Qwen/Qwen2.5-0.5B-Instruct"),
    "12gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "16gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "24gb": gpu("Qwen/Qwen2.5-3B-Instruct"),
}

if __name__ == "__main__":
    run_recipe("sft_lora", __doc__, PRESETS, method=METHOD)
