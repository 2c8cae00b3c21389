"""A model learns to answer questions about a database, as a pydantic-ai agent (https://ai.pydantic.dev) with a tool.

Method. The names of the table and its columns differ in every row. SFT on reference conversations teaches the calls.
GRPO continues from that adapter on the agent's episodes: agent.py runs pydantic-ai's loop, in which the model calls
`query` until it answers. The score is 1 if the answer is the result of the reference query, else 0.

    lora-grpo train sft.py --preset laptop
    lora-grpo train task.py --preset laptop --lora.from outputs/sqlite_tools_sft
"""

from database import load  # noqa: F401 - a task file has it

from lora_grpo.config import laptop_preset
from lora_grpo.pipeline import run_recipe

AGENT = ["uv", "run", "agent.py"]  # in the folder of this file
PROCESSES = 1
EPISODES_PER_PROCESS = 64
PROMPT_TOKENS = 240

PRESETS = {
    "laptop": laptop_preset(
        model={"chat_template": "qwen2_5", "max_sequence_tokens": 336},  # the model's own has no tools
        data={"task": __file__, "eval_limit": 150},
        sampling={"max_completion_tokens": 96, "max_turn_tokens": 56, "num_generations": 12},
        train={
            "max_steps": 8,
            "prompts_per_step": 4,
            "micro_batch_size": 8,
            "learning_rate": 3e-4,
            "warmup_steps": 3,
            "lr_scheduler": "constant_with_warmup",
        },
        eval={"num_samples": 0},
    ),
}

if __name__ == "__main__":
    run_recipe("sqlite_tools", __doc__, PRESETS)
