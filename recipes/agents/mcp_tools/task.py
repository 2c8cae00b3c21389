"""An agent learns to use the tools of an MCP server."""

from shop import make_rows

AGENT = ["uv", "run", "agent.py"]
PROCESSES = 1
EPISODES_PER_PROCESS = 64


def load(split):
    """Return rows with a question and the answer."""
    return make_rows(split)
