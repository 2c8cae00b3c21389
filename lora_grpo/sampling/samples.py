"""What goes into a sampler and what comes out of it: prompts, parameters, completions."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.config import SamplingConfig
from lora_grpo.prompts import plain_text

Prompts = Sequence[str] | Sequence[list[int]]
"""B rendered prompts, or their token ids."""


@dataclass(frozen=True)
class Decoded:
    """The tokens of one completion, without their text. The fields are those of `SampledTokens`."""

    token_ids: list[int]
    logprobs: list[float] | None


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled."""

    num_samples: int
    """Completions per prompt."""
    temperature: float
    """0 decodes greedily."""
    top_p: float
    """Nucleus probability; 1 disables nucleus sampling."""
    max_tokens: int
    """Maximum number of tokens of a completion; in `play`, of a conversation."""
    max_turn_tokens: int | None = None
    """Maximum number of tokens of a turn in a conversation; None for `max_tokens`."""
    max_tokens_by_prompt: tuple[int, ...] | None = None
    """Maximum number for each prompt, if they differ; `max_tokens` is the largest."""
    continues: tuple[int, ...] | None = None
    """In a conversation, the completion of the previous call that each prompt continues; () in the first call. The
    built-in sampler then keeps the cache of all completions between calls. vLLM and llama.cpp do so by themselves."""
    ends_at_next_question: bool = False
    """Whether a completion ends where the model writes the next `Question:`; see `end_at_question`."""

    @classmethod
    def of(cls, settings: SamplingConfig, num_samples: int) -> SamplingParams:
        """Return the settings of training rollouts."""
        return cls(
            num_samples=num_samples,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_completion_tokens,
            max_turn_tokens=settings.max_turn_tokens,
        )

    def token_limit(self, index: int) -> int:
        """Return the maximum number of tokens of the completion with this index in the call."""
        if self.max_tokens_by_prompt is None:
            return self.max_tokens
        return self.max_tokens_by_prompt[index // self.num_samples]


@dataclass(frozen=True)
class SampledTokens:
    """One completion."""

    token_ids: list[int]
    """Sampled tokens, including the end-of-sequence token if one was sampled, or the next `Question:`."""
    text: str
    """The decoded completion, without the next `Question:` and without special tokens but those that mark thoughts."""
    truncated: bool
    """Whether the completion reached the length limit before it ended."""
    logprobs: list[float] | None = field(default=None, compare=False)
    """Logprob of each token in nats, under the distribution it was sampled from (after temperature and top-p). None for
    greedy decoding and for engines that do not return logprobs."""
    asked_next_question: bool = False
    """Whether the completion ended at the next `Question:` of a plain prompt; see `end_at_question`."""


def end_at_question(tokenizer: Any, sample: SampledTokens) -> SampledTokens:
    """Return a completion of a plain prompt up to the next `Question:`, which is not a part of its text.

    Its tokens include those of `Question:`. They are how the model has ended its answer, like an end-of-sequence token,
    so training counts their logprobs. Engines may sample more tokens; the result does not depend on how many.
    """
    answer = plain_text.before_next_question(sample.text)
    if answer == sample.text:
        return sample

    # Find the smallest number of tokens that include `Question:`, by bisection. All of them include it, so the search
    # is among the smaller numbers; if none of these is enough, it returns the number of all.
    smaller_numbers = range(len(sample.token_ids))
    length = bisect.bisect_left(
        smaller_numbers, True, key=lambda number: asks_next_question(tokenizer, sample.token_ids[:number])
    )
    return SampledTokens(
        token_ids=sample.token_ids[:length],
        text=answer,
        truncated=False,
        logprobs=None if sample.logprobs is None else sample.logprobs[:length],
        asked_next_question=True,
    )


def asks_next_question(tokenizer: Any, token_ids: Sequence[int]) -> bool:
    """Return whether tokens contain the next `Question:` of a plain prompt."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return plain_text.before_next_question(text) != text
