"""The processes that play episodes: one that forks a child for each, or some of the user's command."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_grpo.agents.processes import AgentProcess
from lora_grpo.errors import UserError
from lora_grpo.tasks import AgentDefinition

_RESULT_ENTRIES = {"score", "returned", "error"}
"""A line of standard output with one of these is the result of an episode."""


class Runner:
    """A process that plays episodes. All methods run in the event loop.

    Attributes:
        secret: of the address in its environment.
        is_started: whether it has finished an episode, so that all its imports are done.
    """

    def __init__(self, process: AgentProcess, secret: str, *, is_started: bool = False) -> None:
        self.secret = secret
        self.is_started = is_started
        self._process = process
        self._is_ending = False
        self._reserved: set[int] = set()
        self._results: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more episodes."""
        return self._is_ending or self._process.has_ended

    @property
    def num_episodes(self) -> int:
        """How many episodes have a place in it."""
        return len(self._reserved)

    def reserve(self, episode: int) -> None:
        """Give an episode that `run` will play a place, until `release`."""
        self._reserved.add(episode)
        self._results[episode] = asyncio.get_running_loop().create_future()

    def release(self, episode: int) -> None:
        """Take the place of an episode back, after its addresses have been closed."""
        self._reserved.discard(episode)

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Play a reserved episode, and return its result: {"returned": ...}, {"score": ...} or {"error": ...}."""
        result = self._results.get(request["id"])
        if result is None:
            return {"error": "the agent's process ended before it got the episode"}
        if self._reading.done():
            self._fail_all("has ended")
        else:
            await self._process.send(request)
        return await result

    async def kill(self, episode: int) -> None:
        """End an episode, whose result is not wanted any more."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the process and everything that it has started."""
        await self._process.kill()
        await self._reading

    async def _read(self) -> None:
        """Pass the results on. If the process ends, its episodes have failed."""
        problem = ""
        try:
            while (entry := await self._process.receive()) is not None:
                self._take(entry)
        except ValueError:
            problem = "wrote a line of more than 1 MiB to standard output"
        self._is_ending = True
        if not problem:
            problem = f"{await self._process.ending()} before it wrote a score"
        await self._process.kill()  # and what it has started
        self._fail_all(problem)

    def _take(self, entry: dict[str, Any]) -> None:
        """Take a line of standard output. The `id` may be missing if there is one episode."""
        if not _RESULT_ENTRIES & entry.keys() or not self._results:
            return
        episode: Any = entry.get("id")
        if episode is None and len(self._results) == 1:
            [episode] = self._results
        if not isinstance(episode, int):
            self._fail_all(f"answered with the id {episode!r:.40}; expected the number that it was sent")
            return
        result = self._results.pop(episode, None)
        if result is not None:
            self.is_started = True
            if not result.done():
                result.set_result(entry)

    def _fail_all(self, what: str) -> None:
        for result in self._results.values():
            if not result.done():
                result.set_result({"error": f"the agent's process {what}"})
        self._results.clear()


class Host(Runner):
    """The process that forks a child for every episode of the function `agent`; see `host.py`."""

    @classmethod
    async def start(cls, definition: AgentDefinition, log: Path, base_url: str) -> Host:
        """Start the program and let it import the task file, or raise a UserError.

        Args:
            base_url: the address for its first request, which a model does not answer.
        """
        # -P: no module in the folder of the task file replaces one of Python's.
        code = "from lora_grpo.agents.host import main; main()"
        command = [sys.executable, "-P", "-c", code, str(definition.path), base_url]
        process = await AgentProcess.start(command, definition.path.parent, log, {})
        first_entry = await process.receive()
        if first_entry is None or "ready" not in first_entry:
            ending = await process.ending()
            reason = (first_entry or {}).get("error") or f"{definition.path}: the agent's process {ending}; see {log}"
            raise UserError(reason)
        return cls(process, secrets.token_urlsafe(16), is_started=True)

    async def kill(self, episode: int) -> None:
        """End the child of an episode."""
        self._results.pop(episode, None)
        await self._process.send({"kill": episode})


class Worker(Runner):
    """A process of the command `AGENT`."""

    @classmethod
    async def start(cls, definition: AgentDefinition, log: Path, address: str) -> Worker:
        """Start a process, or raise a UserError if there is no such program."""
        program = definition.command[0]
        if shutil.which(program) is None and not (definition.path.parent / program).is_file():
            raise UserError(f"{definition.path}: AGENT starts {program!r}, which is not installed")
        secret = secrets.token_urlsafe(16)
        # Clients demand a key. A user's own one must not be sent anywhere by mistake.
        variables = {"OPENAI_BASE_URL": f"{address}/{secret}/v1", "OPENAI_API_KEY": "-"}
        process = await AgentProcess.start(definition.command, definition.path.parent, log, variables)
        return cls(process, secret)

    async def kill(self, episode: int) -> None:
        """End the process. Other episodes that it plays fail, too."""
        self._is_ending = True
        self._results.pop(episode, None)
        self._fail_all(f"was ended because of another of its episodes, number {episode}")
        await self._process.kill()
