"""A pydantic-ai agent learns to answer questions about a database with a tool."""

from database import make_row

AGENT = ["uv", "run", "agent.py"]
PROCESSES = 1
EPISODES_PER_PROCESS = 64


def load(split):
    """Return rows with a question, the script of its database, and the answer."""
    seeds = range(600) if split == "train" else range(600, 900)
    return [make_row(seed) for seed in seeds]
