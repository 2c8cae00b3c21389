"""One episode of an agent at the endpoint: its requests are answered by the policy, and its calls are kept."""

from __future__ import annotations

import bisect
import hashlib
import json
import secrets
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lora_grpo.endpoint.answers import Policy, all_finished, chat_choice, completion, text_choice, too_long
from lora_grpo.endpoint.contexts import Call, Context, KnownConversations, answer_message
from lora_grpo.endpoint.protocol import ChatRequest, Choice, Completion, RequestError, TextRequest, messages_of
from lora_grpo.prompts import plain_text
from lora_grpo.sampling import Request, SampledTokens, completion_seed


@dataclass(frozen=True)
class EpisodeLimits:
    """How much an episode may sample, and how."""

    temperature: float
    top_p: float
    prompt_tokens: int
    """Maximum number of tokens of the first context."""
    budget: int
    """Maximum number of tokens after the first context: all that the model samples, and what later contexts add."""
    turn_tokens: int
    """Maximum number of tokens of one completion."""


class LiveEpisode:
    """Answers the requests of one episode, and keeps its calls.

    All methods run in the thread of the endpoint.

    Args:
        number: of the episode among those that are played together.
        seed: of the episode. The seed of a call follows from it and from what the call reads.
    """

    def __init__(self, number: int, seed: int, policy: Policy, limits: EpisodeLimits) -> None:
        self.number = number
        self.secret = secrets.token_urlsafe(16)
        """The first part of the path of its address."""
        self.calls: list[Call] = []
        self.ran_out_of_tokens = False
        """Whether a request was refused or cut because the budget was used up."""
        self._seed = seed
        self._policy = policy
        self._limits = limits
        self._conversations = KnownConversations(policy.tokenizer, policy.eos_token_ids, policy.encode)
        self._is_plain = plain_text.asks_in_plain_text(policy.tokenizer, {})
        self._num_calls_by_context: Counter[tuple[int, ...]] = Counter()
        self._key_of_call: dict[Call, tuple[int, tuple[int, ...], int]] = {}
        self._contexts: list[list[int]] = []
        """The contexts of the requests that were accepted, whose tokens are paid for."""
        self._used_tokens = 0  # of the budget, by contexts and finished calls
        self._held_tokens = 0  # of the budget, for the answers to calls that wait for the model
        self._waiting = 0
        self._own_seconds = 0.0
        self._went_on_at = time.monotonic()
        self._is_over = False

    # Time

    @property
    def waits_for_model(self) -> bool:
        """Whether a request of the episode is not answered yet."""
        return self._waiting > 0

    @property
    def seconds_since_answer(self) -> float:
        """How long the agent has worked since its start or its last answer; 0 while it waits for the model."""
        return 0.0 if self._waiting else time.monotonic() - self._went_on_at

    @property
    def own_seconds(self) -> float:
        """How long the agent has worked, without the time in which it waited for the model."""
        return self._own_seconds + self.seconds_since_answer

    def end(self) -> list[Call]:
        """End the episode, whose requests are refused from now on, and return its calls in the order of their places.

        The order does not depend on the order in which parallel calls arrived.
        """
        self._is_over = True
        for key in self._key_of_call.values():
            self._policy.queue.forget(key)
        return sorted(self.calls, key=lambda call: call.place)

    # Requests

    async def chat(self, request: ChatRequest) -> Completion:
        """Answer a chat completion."""
        self._check_sampling(request)
        messages = messages_of(request)
        tools = request.offered_tools
        context = self._conversations.context(messages, tools)
        samples = await self._sample(request, context)
        choices = []
        for sample, place in samples:
            text = context.begun_text + sample.text
            message = answer_message(self._policy.tokenizer, context, sample.token_ids, text, tools=tools)
            call = self._keep(context, sample, text, [*messages, message], place)
            self._conversations.add(call, tools)
            wants_tokens = bool(request.logprobs)
            choices.append(chat_choice(self._policy.tokenizer, message, sample, wants_tokens=wants_tokens))
        return completion(request.model, request, context, [sample for sample, _ in samples], choices)

    async def complete(self, request: TextRequest) -> Completion:
        """Answer a completion of a text."""
        self._check_sampling(request)
        prompt = request.single_prompt
        context = self._conversations.text_context(prompt)
        samples = await self._sample(request, context)
        choices = []
        for sample, place in samples:
            shown_prompt = prompt if isinstance(prompt, str) else self._policy.tokenizer.decode(prompt)
            messages = [{"role": "user", "content": shown_prompt}, {"role": "assistant", "content": sample.text}]
            call = self._keep(context, sample, sample.text, messages, place)
            if isinstance(prompt, str):
                self._conversations.add_text(prompt, call)
            wants_tokens = request.logprobs is not None
            choices.append(text_choice(self._policy.tokenizer, sample, wants_tokens=wants_tokens))
        return completion(request.model, request, context, [sample for sample, _ in samples], choices)

    def _check_sampling(self, request: ChatRequest | TextRequest) -> None:
        """Raise RequestError if the episode is over, or if a request asks for another distribution than the run's."""
        if self._is_over:
            raise RequestError("the episode of this address is over", status=410)
        for name, value in (("temperature", self._limits.temperature), ("top_p", self._limits.top_p)):
            asked = getattr(request, name)
            if asked is not None and asked != value:
                raise RequestError(
                    f"{name} is {asked:g}, but this run samples with {value:g}; leave it out, or set "
                    f"--sampling.{name.replace('_', '-')} of the run"
                )

    async def _sample(
        self, request: ChatRequest | TextRequest, context: Context
    ) -> list[tuple[SampledTokens, tuple[int, list[int], int]]]:
        """Return `n` completions of a context, each with the place of its call."""
        token_limit, num_new_tokens = self._reserve(request, context)
        self._contexts.append(context.token_ids)
        self._used_tokens += num_new_tokens
        held_tokens = token_limit * request.num_choices
        self._held_tokens += held_tokens
        self._begin_waiting()
        futures = []
        places = []
        for _ in range(request.num_choices):
            place = self._place_of_next(context)
            places.append(place)
            futures.append(self._submit(request, context, token_limit, place))
        try:
            samples = await all_finished(futures)
        finally:
            self._held_tokens -= held_tokens
            self._end_waiting()
        self._used_tokens += sum(len(sample.token_ids) for sample in samples)
        turn_limit = min(self._limits.turn_tokens, request.token_limit or self._limits.turn_tokens)
        if token_limit < turn_limit and any(sample.truncated for sample in samples):
            self.ran_out_of_tokens = True
        return list(zip(samples, places, strict=True))

    def _reserve(self, request: ChatRequest | TextRequest, context: Context) -> tuple[int, int]:
        """Return how many tokens a completion may have, and how many of the budget its context takes.

        Raises:
            RequestError: the context does not fit, or leaves no room for a token.
        """
        length = len(context.token_ids)
        if not self.calls and not self._waiting:
            if length > self._limits.prompt_tokens:
                self.ran_out_of_tokens = True
                raise too_long(
                    "the first prompt",
                    f"it has {length} tokens, more than the {self._limits.prompt_tokens} of PROMPT_TOKENS in the task "
                    "file; shorten it, or raise PROMPT_TOKENS",
                )
            # Requests that were canceled are not in the row.
            self._contexts.clear()
            self._used_tokens = 0
            num_new_tokens = 0
        else:
            num_new_tokens = length - self._num_shared(context.token_ids)
        remaining = self._limits.budget - self._used_tokens - self._held_tokens - num_new_tokens
        token_limit = min(self._limits.turn_tokens, remaining // request.num_choices)
        if request.token_limit:
            token_limit = min(token_limit, request.token_limit)
        if token_limit < 1:
            self.ran_out_of_tokens = True
            raise too_long(
                "the request",
                f"the episode has {max(0, remaining + num_new_tokens)} of its {self._limits.budget} tokens left, and "
                f"this request needs {num_new_tokens} for its messages; send less, send max_tokens with parallel "
                "requests, or raise --sampling.max-completion-tokens of the run",
            )
        return token_limit, num_new_tokens

    def _num_shared(self, token_ids: list[int]) -> int:
        """Return how many tokens a context begins with that an earlier request has, too, also one that still waits.

        They are in the row once.
        """
        known = [*self._contexts, *(call.all_ids for call in self.calls)]
        return max((_num_common(token_ids, ids) for ids in known), default=0)

    def _place_of_next(self, context: Context) -> tuple[int, list[int], int]:
        """Return the place of a new call with this context; see `Call.place`."""
        if context.parent is not None:
            depth = context.parent.place[0] + 1
        else:
            depth = 0 if not self.calls else 1  # what starts anew later comes after the first contexts
        context_key = tuple(context.token_ids)
        number = self._num_calls_by_context[context_key]
        self._num_calls_by_context[context_key] += 1
        return depth, context.token_ids, number

    def _submit(
        self, request: ChatRequest | TextRequest, context: Context, token_limit: int, place: tuple[int, list[int], int]
    ) -> Future[SampledTokens]:
        """Ask the sampler for one completion, and return its future."""
        depth, context_ids, number = place
        digest = hashlib.sha256(json.dumps(context_ids).encode()).hexdigest()
        continued_key = self._key_of_call.pop(context.parent, None) if context.parent else None
        return self._policy.queue.submit(
            Request(
                prompt_ids=context.token_ids,
                seed=completion_seed(self._seed, digest, number),
                max_tokens=token_limit,
                temperature=self._limits.temperature,
                top_p=self._limits.top_p,
                stop=request.stop_texts,
                ends_at_next_question=isinstance(request, ChatRequest) and self._is_plain,
                episode=self.number,
                continues=continued_key,
                key=self._cache_key(context_ids, number),
                order=(depth, number),
            )
        )

    def _cache_key(self, context_ids: list[int], number: int) -> tuple[int, tuple[int, ...], int]:
        """Return the key under which the sampler keeps the cache of a call."""
        return self.number, tuple(context_ids), number

    def _keep(
        self,
        context: Context,
        sample: SampledTokens,
        text: str,
        messages: list[dict[str, Any]],
        place: tuple[int, list[int], int],
    ) -> Call:
        """Keep a call that was answered."""
        call = Call(
            context_ids=context.token_ids,
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            text=text,
            truncated=sample.truncated,
            asked_next_question=sample.asked_next_question,
            messages=messages,
            parent=context.parent,
            place=place,
        )
        self.calls.append(call)
        self._key_of_call[call] = self._cache_key(place[1], place[2])
        return call

    def _begin_waiting(self) -> None:
        if not self._waiting:
            self._own_seconds += time.monotonic() - self._went_on_at
        self._waiting += 1

    def _end_waiting(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._went_on_at = time.monotonic()


def _num_common(token_ids: list[int], other_ids: list[int]) -> int:
    """Return how many tokens two sequences begin with in common, by bisection: slices are compared fast."""
    lengths = range(1, min(len(token_ids), len(other_ids)) + 1)
    return bisect.bisect_left(lengths, True, key=lambda length: token_ids[:length] != other_ids[:length])


class WarmUp:
    """Answers requests that only exercise a client, without a model."""

    def __init__(self) -> None:
        self.secret = secrets.token_urlsafe(16)

    async def chat(self, request: ChatRequest) -> Completion:
        """Return a chat completion without tokens."""
        return Completion("chatcmpl-0", "policy", [Choice("", "stop")], prompt_tokens=0, completion_tokens=0)

    async def complete(self, request: TextRequest) -> Completion:
        """Return a completion without tokens."""
        return await self.chat(ChatRequest(messages=[{}]))
