"""Task files with agents, and their episodes."""

from lora_grpo import agents
from lora_grpo.config import RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.rollouts import play_all
from lora_grpo.sampling import SamplingParams, completion_seed

HEAD = """
from openai import AsyncOpenAI, OpenAI

CLIENT = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="-", max_retries=0)

def load(split):
    first = 0 if split == "train" else 100
    return [{"number": number} for number in range(first, first + 40)]

def asks(text):
    return [{"role": "user", "content": text}]

def reply(client, messages, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)
"""
"""The beginning of a task file. An agent follows."""


def rows_of(folder, text, name="task.py"):
    """Write a task file, and return its training rows."""
    path = folder / name
    path.write_text(HEAD + text)
    config = replace(RunConfig(), {"data": {"task": str(path)}})
    # Rows are read in this process; agents run in others.
    return load_data(config).train


def play(sampler, rows, *, group_size=2, budget=400, turn_limit=None, temperature=1.0, seed=0):
    """Return the episodes of rows, one after the other. The agents are then ended."""
    params = SamplingParams(group_size, temperature, 1.0, budget, turn_limit)
    seeds = [completion_seed(seed, "play", number) for number in range(group_size * len(rows))]
    try:
        groups = play_all(sampler, rows, params, seeds)
    finally:
        agents.close_all()
    return [episode for group in groups for episode in group]
