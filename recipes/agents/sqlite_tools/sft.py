"""SFT before task.py: the model learns from reference conversations to call the agent's tool.

The prompts, the tool and its results are those of agent.py, so that the agent continues what SFT has taught.

    lora-grpo train sft.py --preset laptop
"""

from database import INSTRUCTIONS, load, open_database, run_query  # noqa: F401 - a task file has load

from lora_grpo.config import laptop_preset
from lora_grpo.pipeline import run_recipe

# What pydantic-ai sends for the tool of agent.py
PARAMETERS = {
    "additionalProperties": False,
    "properties": {"sql": {"type": "string"}},
    "required": ["sql"],
    "type": "object",
}
FUNCTION = {"name": "query", "description": "Run a SELECT.", "parameters": PARAMETERS, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]


def prompt(row):
    """Return the first messages of an episode."""
    return [
        {"role": "system", "content": INSTRUCTIONS.format(table=row["table"])},
        {"role": "user", "content": row["question"]},
    ]


class Environment:
    """A database that the model queries until it replies."""

    @staticmethod
    def tools_of(row):
        return TOOLS

    def reset(self, script, answer, **row):
        self._database = open_database(script)
        self._expected = answer
        self._answer = None

    def call_tool(self, name, arguments):
        return run_query(self._database, arguments["sql"])

    def reply(self, text):
        self._answer = text.strip()  # and the conversation ends

    def get_reward(self):
        return float(self._answer == self._expected)


def gold(row):
    """Return a conversation that runs the reference query and replies with its result."""
    call = {"type": "function", "function": {"name": "query", "arguments": {"sql": row["query"]}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": row["answer"]},
    ]


METHOD = "sft"
PRESETS = {
    "laptop": laptop_preset(
        model={"chat_template": "qwen2_5", "max_sequence_tokens": 352},  # as in task.py
        data={"task": __file__, "eval_limit": 20},
        sampling={"max_completion_tokens": 96, "max_turn_tokens": 56},
        train={"max_steps": 18, "prompts_per_step": 4, "micro_batch_size": 4, "learning_rate": 5e-4},
        eval={"num_samples": 0},
    ),
}

if __name__ == "__main__":
    run_recipe("sqlite_tools_sft", __doc__, PRESETS, method=METHOD)
