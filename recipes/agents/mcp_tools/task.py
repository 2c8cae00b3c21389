"""A model learns to answer questions about a shop with the tools of an MCP server (https://modelcontextprotocol.io).

Method. SFT on reference conversations teaches the calls. GRPO continues from that adapter on the agent's episodes:
agent.py starts server.py with MCP's Python SDK, offers its tools to the model, and forwards the calls until the model
answers. The score is 1 if the answer is right, else 0. The evaluation questions are about other items.

    lora-grpo train sft.py --preset laptop
    lora-grpo train task.py --preset laptop --lora.from outputs/mcp_tools_sft
"""

from shop import load  # noqa: F401 - a task file has it

from lora_grpo.config import laptop_preset
from lora_grpo.pipeline import run_recipe

AGENT = ["uv", "run", "agent.py"]  # in the folder of this file
PROCESSES = 1
EPISODES_PER_PROCESS = 64
PROMPT_TOKENS = 304

PRESETS = {
    "laptop": laptop_preset(
        model={"chat_template": "qwen2_5", "max_sequence_tokens": 448},  # the model's own has no tools
        data={"task": __file__, "eval_limit": 150},
        sampling={"max_completion_tokens": 144, "max_turn_tokens": 48},
        train={
            "max_steps": 8,
            "prompts_per_step": 6,
            "micro_batch_size": 8,
            "learning_rate": 3e-4,
            "warmup_steps": 3,
            "lr_scheduler": "constant_with_warmup",
        },
        eval={"num_samples": 1},
    ),
}

if __name__ == "__main__":
    run_recipe("mcp_tools", __doc__, PRESETS)
