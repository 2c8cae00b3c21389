"""The agent: OpenAI's client and the tools of an MCP server. It runs in the environment of pyproject.toml.

It starts the server, reads episodes as JSON lines, plays them side by side, and writes their scores as JSON lines.
"""

import asyncio
import json
import sys

from mcp import Client, StdioServerParameters
from openai import AsyncOpenAI
from shop import SYSTEM_PROMPT

MAX_TURNS = 5
SERVER = StdioServerParameters(command=sys.executable, args=["server.py"])
MODEL = AsyncOpenAI(base_url="http://unused", api_key="-")


async def openai_tools(server):
    """Return the tools of the server in OpenAI's form."""
    tools = []
    for tool in (await server.list_tools()).tools:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        tools.append({"type": "function", "function": function})
    return tools


async def play(row, base_url, server, tools):
    """Return the score of an episode."""
    model = MODEL.with_options(base_url=base_url)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row["question"]}]
    for _ in range(MAX_TURNS):
        response = await model.chat.completions.create(model="policy", messages=messages, tools=tools)
        message = response.choices[0].message
        if not message.tool_calls:
            return float((message.content or "").strip() == row["answer"])
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = await server.call_tool(call.function.name, json.loads(call.function.arguments))
            text = "\n".join(block.text for block in result.content)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return 0.0


async def answer(episode, server, tools):
    """Play an episode, and write its score or what went wrong."""
    try:
        entry = {"score": await play(episode["row"], episode["base_url"], server, tools)}
    except Exception as error:  # noqa: BLE001 - reported to the run
        entry = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": episode["id"], **entry}), flush=True)


async def main():
    async with Client(SERVER) as server:
        tools = await openai_tools(server)
        async with asyncio.TaskGroup() as episodes:
            while line := await asyncio.to_thread(sys.stdin.readline):
                episodes.create_task(answer(json.loads(line), server, tools))


asyncio.run(main())
