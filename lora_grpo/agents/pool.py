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
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.agents.runners import Host, Worker
from lora_grpo.endpoint import Call, EpisodeLimits, LiveEpisode, LoopThread, Policy, WarmUp, make_app, serving
from lora_grpo.errors import RunError
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
        self._thread = LoopThread("lora_grpo-agents")
        self._stack = contextlib.AsyncExitStack()
        self._address = ""
        self._answerers: dict[str, LiveEpisode | WarmUp] = {}
        """By the secret of an episode, or of a process."""
        self._warm_up = WarmUp()
        self._finding_runner = asyncio.Lock()
        self._ids = itertools.count()
        """Of episodes, for their processes: an id is never used again, so that nothing late is taken for another."""
        self._answerers[self._warm_up.secret] = self._warm_up
        self._host: Host | None = None
        self._workers: list[Worker] = []
        self.is_closed = False

    def start(
        self, jobs: Sequence[Job], policy: Policy, limits: EpisodeLimits
    ) -> concurrent.futures.Future[list[Played]]:
        """Let the agents play episodes. The queue of the policy is closed when the last one is over."""
        return self._thread.submit(self._play_all(jobs, policy, limits))

    def close(self) -> None:
        """End the agents and the endpoint. Nothing that the agents have started is left."""
        if self.is_closed:
            return
        self.is_closed = True
        self._thread.submit(self._close()).result()
        self._thread.close()
        if self.log.exists() and not self.log.stat().st_size:
            self.log.unlink()

    async def _close(self) -> None:
        if self._host:
            await self._host.close()
        for worker in self._workers:
            await worker.close()
        await self._stack.aclose()

    # Episodes

    async def _play_all(self, jobs: Sequence[Job], policy: Policy, limits: EpisodeLimits) -> list[Played]:
        try:
            if not self._address:
                app = make_app(self._answerers.get, ["policy"])
                self._address = await self._stack.enter_async_context(serving(app))
            num_slots = len(jobs)
            if self._definition.command:
                num_slots = min(num_slots, self._definition.processes * self._definition.episodes_per_process)
            slots = asyncio.Semaphore(num_slots)
            for number in range(num_slots):  # all before the first one asks, so that they ask together
                policy.queue.episode_started(number)
            async with asyncio.TaskGroup() as group:
                tasks = []
                for number, job in enumerate(jobs):
                    tasks.append(group.create_task(self._play(number, job, policy, limits, slots)))
            return [task.result() for task in tasks]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            policy.queue.close()

    async def _play(
        self, number: int, job: Job, policy: Policy, limits: EpisodeLimits, slots: asyncio.Semaphore
    ) -> Played:
        """Play one episode as soon as there is a process for it."""
        async with slots:
            episode_id = next(self._ids)
            runner = await self._runner(episode_id)
            episode = LiveEpisode(number, job.seed, policy, limits)  # its time begins
            self._answerers[episode.secret] = episode
            if self._definition.episodes_per_process == 1:
                self._answerers[runner.secret] = episode
            policy.queue.episode_started(number)
            base_url = f"{self._address}/{episode.secret}/v1"
            request = {"id": episode_id, "seed": job.seed, "row": job.row, "base_url": base_url}
            try:
                answer = await self._run(runner, request, episode, policy.queue)
            finally:
                policy.queue.episode_ended(episode.number)
                self._answerers.pop(episode.secret, None)
                self._answerers.pop(runner.secret, None)
                runner.release(episode_id)
            return self._played(answer, episode)

    async def _run(
        self, runner: Host | Worker, request: dict[str, Any], episode: LiveEpisode, queue: RequestQueue
    ) -> dict[str, Any]:
        """Return what the agent answered for an episode: `{"returned": score}` or `{"error": text}`."""
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
                await runner.kill(request["id"])
                running.cancel()

    def _is_starting(self, runner: Host | Worker, episode: LiveEpisode) -> bool:
        """Return whether the process of an episode has not asked anything yet, and may still import its packages."""
        is_new = not runner.is_started and not episode.calls and not episode.waits_for_model
        return is_new and episode.own_seconds < _SECONDS_TO_IMPORT

    def _exceeded_limit(self, runner: Host | Worker, episode: LiveEpisode) -> str:
        """Return which time limit an episode exceeds, or ""."""
        definition = self._definition
        seconds_per_call = definition.seconds_per_call
        if not runner.is_started and not episode.calls:
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
        elif calls and episode.ran_out_of_tokens:
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

    async def _runner(self, episode_id: int) -> Host | Worker:
        """Reserve a place for an episode in the host of the function `agent`, or in a process of `AGENT`."""
        runner: Host | Worker
        async with self._finding_runner:  # while one starts, the other episodes wait for it
            if self._definition.command:
                runner = await self._worker_with_room()
            else:
                runner = await self._host_of_function()
            runner.reserve(episode_id)
        return runner

    async def _host_of_function(self) -> Host:
        if self._host is None or self._host.has_ended:
            base_url = f"{self._address}/{self._warm_up.secret}/v1"
            self._host = await Host.start(self._definition, self.log, base_url)
        return self._host

    async def _worker_with_room(self) -> Worker:
        """Return a process that can play one more episode."""
        self._workers = [worker for worker in self._workers if not worker.has_ended]
        for worker in self._workers:
            if worker.num_episodes < self._definition.episodes_per_process:
                return worker
        worker = await Worker.start(self._definition, self.log, self._address)
        self._workers.append(worker)
        return worker


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
