"""Plays episodes for task.py: one JSON object a line on standard input and output, as docs/agents.md describes."""

import asyncio
import json
import sys

import verifiers as vf
from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(api_key="-", base_url="http://unused")


async def play(environment, row, base_url):
    """Play an episode of a row, and return its reward."""
    dataset = environment.get_dataset() if row["split"] == "train" else environment.get_eval_dataset()
    client = vf.OpenAIChatCompletionsClient(CLIENT.with_options(base_url=base_url))
    output = await environment.run_rollout(dataset[row["index"]], client, model="policy", sampling_args={})

    # For verifiers, an answer without text is an error, too. It is the model's own, and has a reward.
    error = output["error"]
    if error and error["error"] != "EmptyModelResponseError":
        raise RuntimeError(error["error_chain_repr"])
    return output["reward"]


async def answer(environment, request):
    """Play an episode, and write its result."""
    try:
        result = {"score": await play(environment, request["row"], request["base_url"])}
    except Exception as error:  # noqa: BLE001 - the run counts and shows it
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": request["id"], **result}), flush=True)


async def main(name):
    """Play the episodes of standard input side by side."""
    environment = vf.load_environment(name)
    async with asyncio.TaskGroup() as episodes:
        while line := await asyncio.to_thread(sys.stdin.readline):
            episodes.create_task(answer(environment, json.loads(line)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
