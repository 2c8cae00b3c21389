"""The same task with reference conversations, for the SFT before GRPO: what the agent sends, the model has read."""

from database import INSTRUCTIONS, open_database, run_query
from task import load  # noqa: F401

# What pydantic-ai sends for the tool of agent.py
PARAMETERS = {
    "additionalProperties": False,
    "properties": {"sql": {"description": "SELECT statement", "type": "string"}},
    "required": ["sql"],
    "type": "object",
}
FUNCTION = {"name": "query", "description": "Run a query.", "parameters": PARAMETERS, "strict": True}
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
