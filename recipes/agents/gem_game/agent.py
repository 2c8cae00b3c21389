"""Plays games for task.py: one JSON object a line on standard input and output, as docs/agents.md describes."""

import asyncio
import json
import logging
import sys

import gem
from openai import AsyncOpenAI

GAME = "game:GuessTheNumber-v0-easy"
CLIENT = AsyncOpenAI(api_key="-", base_url="http://unused")

logging.getLogger("httpx").setLevel(logging.WARNING)  # gem shows its line for every request


async def play(seed, base_url, **settings):
    """Return 1.0 if the model wins the game, else 0.0."""
    client = CLIENT.with_options(base_url=base_url)
    env = gem.make(GAME, **settings)
    observation, info = env.reset(seed=seed)
    messages = []
    while True:
        messages.append({"role": "user", "content": observation + info["suffix"]})
        reply = await client.chat.completions.create(model="policy", messages=messages)
        action = reply.choices[0].message.content
        messages.append({"role": "assistant", "content": action})

        observation, reward, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            # gem also rewards a last guess that is close.
            return float(reward == 1 and not truncated)


async def answer(request):
    """Play an episode, and write its result."""
    try:
        result = {"score": await play(base_url=request["base_url"], **request["row"])}
    except Exception as error:  # noqa: BLE001 - the run counts and shows it
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": request["id"], **result}), flush=True)


async def main():
    """Play the episodes of standard input side by side."""
    async with asyncio.TaskGroup() as episodes:
        while line := await asyncio.to_thread(sys.stdin.readline):
            episodes.create_task(answer(json.loads(line)))


if __name__ == "__main__":
    asyncio.run(main())
