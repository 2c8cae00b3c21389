"""Completions that other threads ask for while the thread that owns the model samples: requests and their queue."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.sampling.samples import SampledTokens, SamplingParams


@dataclass(frozen=True)
class Request:
    """A completion that is asked for while others are sampled."""

    prompt_ids: list[int]
    """The tokens that the model continues."""
    seed: int
    """It determines the completion, independent of what else is sampled."""
    max_tokens: int
    """Maximum number of tokens of the completion."""
    temperature: float
    """0 decodes greedily."""
    top_p: float
    """Nucleus probability; 1 disables nucleus sampling."""
    stop: tuple[str, ...] = ()
    """The completion ends with the first token after which its text contains one of them; see `end_early`."""
    ends_at_next_question: bool = False
    """Whether the completion ends where the model writes the next `Question:`; see `end_early`."""
    adapter: bool = True
    """False samples from the base model, also where the sampler is awake with its adapter."""
    episode: int | None = None
    """Number of the live episode that waits for the completion; None outside episodes."""
    continues: Hashable | None = None
    """Key of an earlier completion whose cache this prompt goes on with, if it is still kept."""
    key: Hashable | None = None
    """Key under which the completion's cache is kept until `RequestQueue.forget`, or until it is continued."""
    order: tuple[Any, ...] = ()
    """Place among the requests of the same episode in a wave. Orders that meet in a wave must be comparable."""

    @property
    def params(self) -> SamplingParams:
        """The parameters of a call that samples this completion alone."""
        return SamplingParams(
            num_samples=1,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            ends_at_next_question=self.ends_at_next_question,
            stop=self.stop,
        )


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request and the future that its thread waits for, which may be canceled at any time."""

    request: Request
    future: Future[SampledTokens]
    arrived: float
    """When the request arrived, in seconds of `time.monotonic`."""

    def finish(self, sample: SampledTokens) -> bool:
        """Set the completion. Return False if the request was canceled or has a result already."""
        try:
            self.future.set_result(sample)
        except InvalidStateError:
            return False
        return True

    def fail(self, error: Exception) -> None:
        """Set an error, unless the request was canceled or has a result already."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            return


class RequestQueue:
    """Requests of any threads, which `Sampler.serve` takes in the thread that owns the model.

    The built-in sampler takes them in waves. A wave is ready when requests are pending, nothing has arrived for
    `settle` seconds, and every live episode has a pending request or is late. So a wave depends on what the episodes
    ask for, and not on when they do. An episode that makes others wait for longer than `patience` seconds is late until
    it asks again. Engines that take requests as they come have no waves.

    For waves that do not depend on time, start all episodes of a batch before the first of them asks, and forget the
    keys of an episode before it ends.

    Args:
        patience: seconds that the others wait for an episode that asks for nothing.
        settle: seconds without a new request after which a wave may be ready.
    """

    def __init__(self, *, patience: float = 1.0, settle: float = 0.02) -> None:
        self._patience = patience
        self._settle = settle
        self._changed = threading.Condition()
        """Guards all fields below, and wakes up the thread that owns the model."""
        self._pending: list[Waiting] = []
        """Requests that are waiting to be taken."""
        self._unfinished: set[Waiting] = set()
        """All requests without a result: those that are pending, and those that were taken."""
        self._busy_since: dict[int, float] = {}
        """The live episodes, with the time of the last answer to each, or of its start."""
        self._late: set[int] = set()
        """The live episodes for which the others no longer wait."""
        self._forgotten: list[Hashable] = []
        self._last_arrival = 0.0
        self._closed = False
        self._error: Exception | None = None

    # Any thread

    def submit(self, request: Request) -> Future[SampledTokens]:
        """Ask for a completion. Canceling the future withdraws the request."""
        waiting = Waiting(request, Future(), arrived=time.monotonic())
        with self._changed:
            error = self._error
            if error is None and self._closed:
                error = RunError("the sampler has ended, so it takes no more requests")
            if error is None:
                self._pending.append(waiting)
                self._unfinished.add(waiting)
                self._last_arrival = waiting.arrived
                if request.episode is not None:
                    self._late.discard(request.episode)
                self._changed.notify_all()
        if error is not None:
            waiting.fail(error)
        waiting.future.add_done_callback(functools.partial(self._remove, waiting))
        return waiting.future

    def episode_started(self, episode: int) -> None:
        """Let waves wait for an episode, until it ends or is late."""
        with self._changed:
            self._busy_since[episode] = time.monotonic()
            self._changed.notify_all()

    def episode_ended(self, episode: int) -> None:
        """No longer wait for an episode."""
        with self._changed:
            self._busy_since.pop(episode, None)
            self._late.discard(episode)
            self._changed.notify_all()

    def forget(self, key: Hashable) -> None:
        """Free the cache that is kept under a key, before the next wave. A key that is not kept is ignored."""
        with self._changed:
            self._forgotten.append(key)

    def close(self) -> None:
        """Take no more requests. `serve` returns when none is pending."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Give an error to all requests without a result, to all later ones, and to the thread that serves."""
        if not isinstance(error, Exception):  # Ctrl-C is for the main thread alone
            error = RunError("sampling was interrupted")
        with self._changed:
            if self._error is None:
                self._error = error
            unfinished = list(self._unfinished)
            self._changed.notify_all()
        for waiting in unfinished:
            waiting.fail(error)

    # The thread that owns the model

    def next_wave(self) -> list[Waiting] | None:
        """Wait for a wave and return it, sorted by what it asks for; None when the queue is closed and empty."""
        with self._changed:
            free_since = time.monotonic()
            while True:
                self._raise_error()
                if self._pending:
                    seconds = self._seconds_until_ready(free_since)
                    if seconds <= 0:
                        return sorted(self._take_pending(), key=_place)
                    self._changed.wait(seconds)
                elif self._closed:
                    return None
                else:
                    self._changed.wait()

    def take_arrived(self, *, wait: bool = False) -> list[Waiting] | None:
        """Return the requests that have arrived, without waiting for others.

        For engines that take requests as they come, and find the beginnings of prompts in their own caches.

        Args:
            wait: wait for at least one request. Then the result is None when the queue is closed and empty.
        """
        with self._changed:
            self._raise_error()
            while wait and not self._pending:
                if self._closed:
                    return None
                self._changed.wait()
                self._raise_error()
            self._forgotten.clear()  # nothing is kept under keys
            return self._take_pending()

    def take_forgotten(self) -> list[Hashable]:
        """Return the keys that `forget` was called with since the last call."""
        with self._changed:
            forgotten = self._forgotten
            self._forgotten = []
            return forgotten

    def _take_pending(self) -> list[Waiting]:
        pending = self._pending
        self._pending = []
        return pending

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _seconds_until_ready(self, free_since: float) -> float:
        """Return how long the pending requests have to wait at least, if nothing else happens; 0 if they are a wave.

        Args:
            free_since: when the model became free. Before that, nobody waits for an episode.
        """
        if self._closed:
            return 0.0
        now = time.monotonic()
        wait = self._last_arrival + self._settle - now
        waiting_episodes = {waiting.request.episode for waiting in self._pending}
        first_arrival = min(waiting.arrived for waiting in self._pending)
        for episode, busy_since in self._busy_since.items():
            if episode in waiting_episodes or episode in self._late:
                continue
            seconds_left = max(busy_since, first_arrival, free_since) + self._patience - now
            if seconds_left <= 0:
                self._late.add(episode)
            wait = max(wait, seconds_left)
        return max(wait, 0.0)

    def _remove(self, waiting: Waiting, future: Future[SampledTokens]) -> None:
        """Remove a request that is finished, failed or canceled."""
        with self._changed:
            self._unfinished.discard(waiting)
            if waiting in self._pending:
                self._pending.remove(waiting)
            if waiting.request.episode in self._busy_since:
                self._busy_since[waiting.request.episode] = time.monotonic()
            self._changed.notify_all()


def _place(waiting: Waiting) -> tuple[Any, ...]:
    """Return what requests of a wave are sorted by. Those outside episodes come first."""
    request = waiting.request
    episode = -1 if request.episode is None else request.episode
    return (episode, request.order, request.prompt_ids, request.seed)


def serve_in_threads(queue: RequestQueue, complete: Callable[[Request], SampledTokens], threads: int) -> None:
    """Serve requests as they come, at most `threads` at once, until the queue is closed and they are finished.

    Args:
        complete: returns the completion of a request. It is called in other threads.
    """

    def answer(waiting: Waiting) -> None:
        if waiting.future.cancelled():
            return
        try:
            sample = complete(waiting.request)
        except Exception as error:  # noqa: BLE001 - raised in the thread that serves
            queue.fail(error)
        else:
            waiting.finish(sample)

    pool = ThreadPoolExecutor(threads)
    try:
        while (arrived := queue.take_arrived(wait=True)) is not None:
            for waiting in arrived:
                pool.submit(answer, waiting)
        pool.shutdown()  # waits for those that were taken
        queue.take_arrived()  # raises the error of one of them
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
