"""What everything that answers requests shares: the policy, and how samples become answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

from lora_grpo.endpoint.contexts import Context
from lora_grpo.endpoint.protocol import Choice, Completion, RequestError, SamplingFields, Token
from lora_grpo.sampling import RequestQueue, SampledTokens


def too_long(what: str, details: str) -> RequestError:
    """Return the error for a request that does not fit, with the code and the words that frameworks search for."""
    return RequestError(f"{what} exceeds the maximum context length: {details}", code="context_length_exceeded")


@dataclass(frozen=True)
class Policy:
    """The model that answers, as far as the endpoint needs it."""

    tokenizer: Any
    eos_token_ids: Sequence[int]
    encode: Callable[[list[str]], list[list[int]]]
    """Returns the ids of rendered prompts; see `Sampler.encode`."""
    queue: RequestQueue
    """Where completions are asked for."""


async def all_finished(futures: Sequence[Future[SampledTokens]]) -> list[SampledTokens]:
    """Return the completions of one request. If its client hangs up, they are canceled."""
    try:
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
    except asyncio.CancelledError:
        for future in futures:
            future.cancel()
        raise


def chat_choice(tokenizer: Any, message: dict[str, Any], sample: SampledTokens, *, wants_tokens: bool) -> Choice:
    """Return one choice of a chat completion.

    Args:
        message: result of `answer_message`.
    """
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        arguments = json.dumps(function["arguments"])
        digest = hashlib.sha256(json.dumps([sample.token_ids, number]).encode()).hexdigest()
        named = {"name": function["name"], "arguments": arguments}
        calls.append({"id": f"call_{digest[:24]}", "type": "function", "function": named})

    reason: Literal["stop", "length", "tool_calls"] = "stop"
    if sample.truncated:
        reason = "length"
    elif calls:
        reason = "tool_calls"
    return Choice(
        content=message["content"],
        finish_reason=reason,
        reasoning_content=message.get("reasoning_content", ""),
        tool_calls=tuple(calls),
        tokens=_tokens(tokenizer, sample) if wants_tokens else None,
    )


def text_choice(tokenizer: Any, sample: SampledTokens, *, wants_tokens: bool) -> Choice:
    """Return one choice of a completion of a text."""
    return Choice(
        content=sample.text,
        finish_reason="length" if sample.truncated else "stop",
        tokens=_tokens(tokenizer, sample) if wants_tokens else None,
    )


def completion(
    model: str, request: SamplingFields, context: Context, samples: Sequence[SampledTokens], choices: Sequence[Choice]
) -> Completion:
    """Return the answer to a request."""
    prompt_token_ids = None
    if request.return_token_ids:
        prompt_token_ids = context.token_ids
        choices = [replace(choice, token_ids=sample.token_ids) for choice, sample in zip(choices, samples, strict=True)]
    return Completion(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        model=model or "policy",
        choices=choices,
        prompt_tokens=len(context.token_ids),
        completion_tokens=sum(len(sample.token_ids) for sample in samples),
        prompt_token_ids=prompt_token_ids,
    )


def _tokens(tokenizer: Any, sample: SampledTokens) -> tuple[Token, ...]:
    texts = [tokenizer.decode([token_id]) for token_id in sample.token_ids]
    logprobs: Sequence[float | None] = sample.logprobs or [None] * len(texts)
    return tuple(Token(text, logprob) for text, logprob in zip(texts, logprobs, strict=True))
