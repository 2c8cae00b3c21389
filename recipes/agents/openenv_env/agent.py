"""Plays episodes for task.py: one JSON object a line on standard input and output, as docs/agents.md describes."""

import asyncio
import functools
import json
import sys

from doors import DoorsAction, DoorsClient, DoorsEnvironment
from openai import AsyncOpenAI
from openenv.core.client_types import StepResult
from openenv.core.containers.runtime import UVProvider

EXAMPLE = [  # with colors that no room has
    {"role": "system", "content": "Reply with one word."},
    {
        "role": "user",
        "content": "There are a cyan, a beige and a violet door. The sign says beige. Which door do you take?",
    },
    {"role": "assistant", "content": "beige"},
]
CLIENT = AsyncOpenAI(api_key="-", base_url="http://unused")


class InProcess:
    """The environment without a server, with the methods of its client."""

    async def __aenter__(self):
        self._environment = DoorsEnvironment()
        return self

    async def __aexit__(self, *error):
        self._environment.close()

    async def reset(self, **options):
        return step_result(self._environment.reset(**options))

    async def step(self, action):
        return step_result(self._environment.step(action))


def step_result(observation):
    """Return an observation in the form in which a client gets it."""
    return StepResult(observation, observation.reward, observation.done)


async def play(connection, row, base_url):
    """Play an episode, and return the sum of its rewards."""
    client = CLIENT.with_options(base_url=base_url)
    messages = [*EXAMPLE]
    score = 0.0
    async with connection as env:
        result = await env.reset(seed=row["seed"])
        while not result.done:
            messages.append({"role": "user", "content": result.observation.text})
            reply = await client.chat.completions.create(model="policy", messages=messages)
            text = reply.choices[0].message.content
            messages.append({"role": "assistant", "content": text})
            result = await env.step(DoorsAction(text=text))
            score += result.reward
    return score


async def answer(request, connect):
    """Play an episode, and write its result."""
    try:
        result = {"score": await play(connect(), request["row"], request["base_url"])}
    except Exception as error:  # noqa: BLE001 - the run counts and shows it
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": request["id"], **result}), flush=True)


async def main(connect):
    """Play the episodes of standard input side by side."""
    async with asyncio.TaskGroup() as episodes:
        while line := await asyncio.to_thread(sys.stdin.readline):
            episodes.create_task(answer(json.loads(line), connect))


def main_with_server():
    """Play against OpenEnv's server, in another process."""
    server = UVProvider(project_path=".", app="server:app", host="127.0.0.1")
    try:
        address = server.start()
        server.wait_for_ready()
        asyncio.run(main(functools.partial(DoorsClient, base_url=address)))
    finally:
        server.stop()


if __name__ == "__main__":
    if "--server" in sys.argv:
        main_with_server()
    else:
        asyncio.run(main(InProcess))
