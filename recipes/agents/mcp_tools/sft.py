"""SFT before task.py: the model learns from reference conversations to call the tools of the MCP server.

The prompts, the tools and their results are those of agent.py, so that the agent continues what SFT has taught.

    lora-grpo train sft.py --preset laptop
"""

from shop import GOODS, SYSTEM_PROMPT, load  # noqa: F401 - a task file has these

from lora_grpo.config import laptop_preset
from lora_grpo.pipeline import run_recipe


def tool(name, description):
    """Return a tool with an item as its argument, as the MCP server describes it."""
    parameters = {
        "type": "object",
        "properties": {"item": {"title": "Item", "type": "string"}},
        "required": ["item"],
        "title": f"{name}Arguments",
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("price", "Look up what an item costs."),
    tool("pieces", "Look up how many pieces of an item are left."),
]


class Environment:
    """The shop. The model calls its tools until it replies."""

    @staticmethod
    def tools_of(row):
        return TOOLS

    def reset(self, answer, **row):
        self._expected = answer
        self._answer = None

    def call_tool(self, name, arguments):
        return getattr(GOODS[arguments["item"]], name)

    def reply(self, text):
        self._answer = text.strip()  # and the conversation ends

    def get_reward(self):
        return float(self._answer == self._expected)


def gold(row):
    """Return a conversation that makes the calls one by one, and replies with the answer."""
    messages = []
    for name, item in row["calls"]:
        call = {"type": "function", "function": {"name": name, "arguments": {"item": item}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    return [*messages, {"role": "assistant", "content": row["answer"]}]


METHOD = "sft"
PRESETS = {
    "laptop": laptop_preset(
        model={"chat_template": "qwen2_5", "max_sequence_tokens": 448},  # as in task.py
        data={"task": __file__, "eval_limit": 20},
        sampling={"max_completion_tokens": 144, "max_turn_tokens": 48},
        train={"max_steps": 12, "prompts_per_step": 4, "micro_batch_size": 4, "learning_rate": 5e-4},
        eval={"num_samples": 0},
    ),
}

if __name__ == "__main__":
    run_recipe("mcp_tools_sft", __doc__, PRESETS, method=METHOD)
