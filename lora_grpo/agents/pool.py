"""The agents of a task: their processes, the endpoint that they talk to, and the episodes that they play.

Everything here runs in an event loop in a thread of its own. The thread that owns the model serves the requests
meanwhile:

    playing = pool.start(jobs, policy, limits)      # the agents begin
    sampler.serve(policy.queue)                     # answers them, until the last episode is over
    results = playing.result()
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import shutil
import sys
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lora_grpo.agents.processes import AgentProcess
from lora_grpo.endpoint import Call, EpisodeLimits, LiveEpisode, Policy, WarmUp, make_app, serving
from lora_grpo.errors import RunError, UserError
from lora_grpo.grading import Row, Verdict, as_verdict
from lora_grpo.sampling import RequestQueue
from lora_grpo.tasks import AgentDefinition

FAILED = "agent_failed"
"""The reason of the verdict on an episode whose agent failed."""
_SECONDS_TO_START = 600.0
"""How long a process may take from its start to its first request, which may install packages."""
_SECONDS_TO_IMPORT = 60.0
"""How long the other episodes wait for a process that was just started."""
_SECONDS_BETWEEN_CHECKS = 0.25
_TOKEN_LIMIT = "token_limit"
_RESULT_ENTRIES = {"score", "returned", "error"}
"""A line of standard output with one of these is the result of an episode."""

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """An episode that is to be played."""

    row: Row
    """The columns that `load` returned."""
    seed: int


@dataclass(frozen=True)
class Played:
    """An episode that is over."""

    calls: Sequence[Call]
    """In an order that does not depend on the order in which parallel calls arrived."""
    verdict: Verdict
    failure: str = ""
    """Why the agent failed, in one line; "" if it returned a score."""
    ran_out_of_tokens: bool = False
    seconds: float = 0.0
    """How long the agent worked, without the time in which it waited for the model."""


@dataclass
class Counts:
    """The episodes of a pool so far."""

    episodes: int = 0
    failed: int = 0
    first_failure: str = ""


class AgentPool:
    """The agents of one task. Their processes start with the first episodes and end with `close`.

    Args:
        log: the file for the standard error of the agents.
    """

    def __init__(self, definition: AgentDefinition, log: Path) -> None:
        self._definition = definition
        self.log = log
        self.counts = Counts()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lora_grpo-agents", daemon=True)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self._address = ""
        self._answerers: dict[str, LiveEpisode | WarmUp] = {}
        """By the secret of an episode, or of a process."""
        self._warm_up = WarmUp()
        self._starting_host = asyncio.Lock()
        self._answerers[self._warm_up.secret] = self._warm_up
        self._host: _Host | None = None
        self._idle_workers: list[_Worker] = []
        self._is_closed = False

    def start(
        self, jobs: Sequence[Job], policy: Policy, limits: EpisodeLimits
    ) -> concurrent.futures.Future[list[Played]]:
        """Let the agents play episodes. The queue of the policy is closed when the last one is over."""
        return self._submit(self._play_all(jobs, policy, limits))

    def close(self) -> None:
        """End the agents and the endpoint. Nothing that the agents have started is left."""
        if self._is_closed:
            return
        self._is_closed = True
        self._submit(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self.log.exists() and not self.log.stat().st_size:
            self.log.unlink()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _close(self) -> None:
        if self._host:
            await self._host.close()
        for worker in self._idle_workers:
            await worker.process.kill()
        await self._stack.aclose()

    # Episodes

    async def _play_all(self, jobs: Sequence[Job], policy: Policy, limits: EpisodeLimits) -> list[Played]:
        try:
            if not self._address:
                app = make_app(self._answerers.get, ["policy"])
                self._address = await self._stack.enter_async_context(serving(app))
            num_slots = len(jobs)
            if self._definition.command:
                num_slots = min(num_slots, self._definition.processes)
            slots = asyncio.Semaphore(num_slots)
            for number in range(num_slots):  # all before the first one asks, so that they ask together
                policy.queue.episode_started(number)
            async with asyncio.TaskGroup() as group:
                tasks = []
                for number, job in enumerate(jobs):
                    episode = LiveEpisode(number, job.seed, policy, limits)
                    tasks.append(group.create_task(self._play(job, episode, policy, slots)))
            return [task.result() for task in tasks]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            policy.queue.close()

    async def _play(self, job: Job, episode: LiveEpisode, policy: Policy, slots: asyncio.Semaphore) -> Played:
        """Play one episode as soon as there is a process for it."""
        async with slots:
            runner = await self._runner()
            self._answerers[episode.secret] = episode
            self._answerers[runner.secret] = episode
            policy.queue.episode_started(episode.number)
            try:
                answer = await self._run(runner, job, episode, policy.queue)
            finally:
                policy.queue.episode_ended(episode.number)
                self._answerers.pop(episode.secret, None)
                self._answerers.pop(runner.secret, None)
            return self._played(answer, episode)

    async def _run(
        self, runner: _Host | _Worker, job: Job, episode: LiveEpisode, queue: RequestQueue
    ) -> dict[str, Any]:
        """Return what the agent answered for an episode: `{"returned": score}` or `{"error": text}`."""
        request = {
            "id": episode.number,
            "seed": job.seed,
            "row": job.row,
            "base_url": f"{self._address}/{episode.secret}/v1",
        }
        running = asyncio.ensure_future(runner.run(request))
        try:
            while True:
                await asyncio.wait((running,), timeout=_SECONDS_BETWEEN_CHECKS)
                if running.done():
                    return running.result()
                if problem := self._exceeded_limit(runner, episode):
                    return {"error": problem}
                if self._is_starting(runner, episode):
                    queue.episode_started(episode.number)  # let the others wait for it
        finally:
            if not running.done():
                await runner.kill(episode.number)
                running.cancel()
            if isinstance(runner, _Worker) and not runner.process.has_ended:
                self._idle_workers.append(runner)

    def _is_starting(self, runner: _Host | _Worker, episode: LiveEpisode) -> bool:
        """Return whether the process of an episode has not asked anything yet, and may still import its packages."""
        is_new = not runner.has_called and not episode.calls and not episode.waits_for_model
        return is_new and episode.own_seconds < _SECONDS_TO_IMPORT

    def _exceeded_limit(self, runner: _Host | _Worker, episode: LiveEpisode) -> str:
        """Return which time limit an episode exceeds, or ""."""
        definition = self._definition
        seconds_per_call = definition.seconds_per_call
        if not runner.has_called and not episode.calls:
            seconds_per_call = max(seconds_per_call, _SECONDS_TO_START if seconds_per_call else 0.0)
        if seconds_per_call and episode.seconds_since_answer > seconds_per_call:
            return f"the agent took more than {seconds_per_call:g} s without a call of the model (SECONDS_PER_CALL)"
        if definition.seconds_per_episode and episode.own_seconds > definition.seconds_per_episode:
            return f"the agent took more than {definition.seconds_per_episode:g} s in all (SECONDS_PER_EPISODE)"
        return ""

    def _played(self, answer: dict[str, Any], episode: LiveEpisode) -> Played:
        """Return the result of an episode, and count it."""
        seconds = episode.own_seconds
        calls = episode.end()
        failure = str(answer.get("error") or "")
        verdict = None
        if not failure:
            verdict = self._verdict(answer)
            if verdict is None:
                shown = answer.get("returned", answer)
                failure = f"{self._definition.path}: the agent returned {shown!r:.200}; expected a score from 0 to 1"
            elif not calls:
                failure = f"{self._definition.path}: the agent returned without a call of the model"
        elif episode.ran_out_of_tokens:
            # The model wrote too much for what the agent asked next. That is no fault of the agent.
            verdict = Verdict(False, _TOKEN_LIMIT, detail=failure)
            failure = ""
        if failure:
            verdict = Verdict(False, FAILED, detail=failure)
        assert verdict is not None
        self._count(failure)
        return Played(calls, verdict, failure, episode.ran_out_of_tokens, seconds)

    def _verdict(self, answer: dict[str, Any]) -> Verdict | None:
        returned = answer.get("returned", answer.get("score"))
        if isinstance(returned, dict):
            try:
                returned = Verdict(**returned)
            except TypeError:
                return None
        return as_verdict(returned, self._definition.threshold)

    def _count(self, failure: str) -> None:
        self.counts.episodes += 1
        if failure:
            self.counts.failed += 1
            self.counts.first_failure = self.counts.first_failure or failure

    # Processes

    async def _runner(self) -> _Host | _Worker:
        """Return the host of the function `agent`, or an idle process of the command `AGENT`."""
        definition = self._definition
        if not definition.command:
            async with self._starting_host:
                if self._host is None or self._host.has_ended:
                    base_url = f"{self._address}/{self._warm_up.secret}/v1"
                    self._host = await _Host.start(definition, self.log, base_url)
            return self._host
        while self._idle_workers:
            worker = self._idle_workers.pop()
            if not worker.process.has_ended:
                return worker
        return await _Worker.start(definition, self.log, self._address)


def check_failures(counts: Counts, definition: AgentDefinition, log: Path) -> None:
    """Raise a RunError if more episodes have failed than the task file allows."""
    # A few failures among the first episodes say little.
    allowed = definition.max_failed * max(counts.episodes, 20)
    all_failed = counts.failed == counts.episodes and definition.max_failed < 1
    if counts.failed > allowed or all_failed:
        raise RunError(
            f"{counts.failed} of {counts.episodes} episodes failed, more than MAX_FAILED {definition.max_failed:g} "
            f"allows; the first: {counts.first_failure}; {log} has what the agents wrote to standard error"
        )


@dataclass
class _Host:
    """The process that forks a child for every episode; see `host.py`."""

    process: AgentProcess
    secret: str
    results: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    reading: asyncio.Task[None] | None = None
    has_called = True
    """It has imported the task file, so that an agent has the usual time for its first call."""

    @classmethod
    async def start(cls, definition: AgentDefinition, log: Path, base_url: str) -> _Host:
        """Start the program and let it import the task file, or raise a UserError."""
        # -P: no module in the folder of the task file replaces one of Python's.
        code = "from lora_grpo.agents.host import main; main()"
        command = [sys.executable, "-P", "-c", code, str(definition.path), base_url]
        process = await AgentProcess.start(command, definition.path.parent, log, {})
        first_entry = await process.receive()
        if first_entry is None or "ready" not in first_entry:
            ending = await process.ending()
            reason = (first_entry or {}).get("error") or f"{definition.path}: the agent's process {ending}; see {log}"
            raise UserError(reason)
        host = cls(process, process.mark)
        host.reading = asyncio.create_task(host._read())
        return host

    @property
    def has_ended(self) -> bool:
        return self.process.has_ended

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run an episode, and return its result."""
        result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.results[request["id"]] = result
        await self.process.send(request)
        return await result

    async def kill(self, episode: int) -> None:
        """End the child of an episode."""
        self.results.pop(episode, None)
        await self.process.send({"kill": episode})

    async def close(self) -> None:
        """End the process and its children."""
        await self.process.kill()
        if self.reading:
            await self.reading

    async def _read(self) -> None:
        """Pass the results on. If the process ends, so do the episodes."""
        while (entry := await self.process.receive()) is not None:
            result = self.results.pop(entry["id"], None)
            if result and not result.done():
                result.set_result(entry)
        ending = await self.process.ending()
        for result in self.results.values():
            if not result.done():
                result.set_result({"error": f"the process of the agents {ending}"})
        self.results.clear()


@dataclass
class _Worker:
    """A process of the command `AGENT`, which plays one episode after the other."""

    process: AgentProcess
    secret: str
    """Of the address in its environment."""
    has_called: bool = False
    """Whether it has finished an episode, so that it is started."""

    @classmethod
    async def start(cls, definition: AgentDefinition, log: Path, address: str) -> _Worker:
        """Start a process, or raise a UserError if there is no such program."""
        program = definition.command[0]
        if shutil.which(program) is None and not (definition.path.parent / program).is_file():
            raise UserError(f"{definition.path}: AGENT starts {program!r}, which is not installed")
        secret = secrets.token_urlsafe(16)
        variables = {"OPENAI_BASE_URL": f"{address}/{secret}/v1"}
        # Clients demand a key. A user's own one must not be sent anywhere by mistake.
        variables["OPENAI_API_KEY"] = "-"
        process = await AgentProcess.start(definition.command, definition.path.parent, log, variables)
        return cls(process, secret)

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run an episode, and return its result."""
        await self.process.send(request)
        try:
            while (entry := await self.process.receive()) is not None:
                is_of_another = entry.get("id", request["id"]) != request["id"]
                if is_of_another or not _RESULT_ENTRIES & entry.keys():
                    continue
                self.has_called = True
                return entry
        except ValueError:
            await self.process.kill()
            return {"error": "the agent's process wrote a line of more than 1 MiB to standard output"}
        ending = await self.process.ending()
        await self.process.kill()  # what it has started
        return {"error": f"the agent's process {ending} before it wrote a score"}

    async def kill(self, episode: int) -> None:
        """End the process, which has no other episode."""
        await self.process.kill()
