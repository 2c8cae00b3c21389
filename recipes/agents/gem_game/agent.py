"""Plays games for task.py: one JSON object a line on standard input and output, as docs/agents.md describes."""

import asyncio
import json
import logging
import sys

import gem
from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(base_url="http://unused", api_key="-")
GAME = "game:GuessTheNumber-v0-easy"
QUESTION = "Guess my number between {min_number} and {max_number}."
EXAMPLE = [  # gem's own instructions are long, and this model does not follow them
    {"role": "system", "content": "Reply with one number."},
    {"role": "user", "content": QUESTION.format(min_number=61, max_number=63)},
    {"role": "assistant", "content": "62"},
    {"role": "user", "content": "At turn 1, you guessed 62, and the target number is lower than 62."},
    {"role": "assistant", "content": "61"},
]

logging.getLogger("httpx").setLevel(logging.WARNING)  # gem shows the line that it writes for every request


async def play(seed, settings, base_url):
    """Return 1.0 if the model wins the game, else 0.0."""
    client = CLIENT.with_options(base_url=base_url)
    env = gem.make(GAME, **settings)
    env.reset(seed=seed)
    messages = [*EXAMPLE, {"role": "user", "content": QUESTION.format(**settings)}]
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content
        observation, reward, terminated, truncated, _ = env.step(f"\\boxed{{{text.strip()}}}")
        if terminated or truncated:
            return float(reward == 1 and not truncated)  # gem also rewards a last guess that is close
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": observation})


async def answer(request):
    """Play an episode, and write its result."""
    row = request["row"]
    try:
        result = {"score": await play(row["seed"], row["settings"], request["base_url"])}
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
