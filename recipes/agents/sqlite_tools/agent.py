"""The agent: pydantic-ai's loop with a tool that queries a database. It runs in the environment of pyproject.toml.

It reads episodes as JSON lines, plays them side by side, and writes their scores as JSON lines.
"""

import asyncio
import json
import sqlite3
import sys

from database import INSTRUCTIONS, open_database, run_query
from pydantic_ai import Agent, ModelRetry, RunContext, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(deps_type=sqlite3.Connection)


@agent.tool
async def query(ctx: RunContext[sqlite3.Connection], sql: str) -> str:
    """Run a SELECT."""
    try:
        return run_query(ctx.deps, sql)
    except (sqlite3.Error, sqlite3.Warning, UnicodeError) as error:
        raise ModelRetry(str(error)) from error  # the model reads it, and may try again


async def play(row, base_url):
    """Return the score of an episode."""
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key="-"))
    try:
        result = await agent.run(
            row["question"],
            instructions=INSTRUCTIONS.format(table=row["table"]),
            model=model,
            deps=open_database(row["script"]),
            usage_limits=UsageLimits(request_limit=4),
        )
    except (UnexpectedModelBehavior, UsageLimitExceeded):  # too many wrong calls, an empty answer, or no end
        return 0.0
    return float(result.output.strip() == row["answer"])


async def answer(episode):
    """Play an episode, and write its score or what went wrong."""
    try:
        entry = {"score": await play(episode["row"], episode["base_url"])}
    except Exception as error:  # noqa: BLE001 - reported to the run
        entry = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": episode["id"], **entry}), flush=True)


async def main():
    async with asyncio.TaskGroup() as episodes:
        while line := await asyncio.to_thread(sys.stdin.readline):
            episodes.create_task(answer(json.loads(line)))


asyncio.run(main())
