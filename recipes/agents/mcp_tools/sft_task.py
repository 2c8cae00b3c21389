"""The same task with reference conversations, for the SFT before GRPO: what the agent sends, the model has read."""

from shop import GOODS, SYSTEM_PROMPT  # noqa: F401
from task import load  # noqa: F401


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
