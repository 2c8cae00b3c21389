"""What goes into a sampler and what comes out of it: prompts, parameters, completions."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.config import SamplingConfig
from lora_grpo.prompts import plain_text, thoughts

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
    continues: tuple[Hashable | None, ...] | None = None
    """Key of the kept cache that each prompt goes on with, or None. The cache is used, and then no longer kept, if the
    prompt begins with its tokens. Otherwise, the sampler reads the whole prompt."""
    keys: tuple[Hashable | None, ...] | None = None
    """Key under which the cache of each completion is kept until it is continued or forgotten (`Sampler.forget`), or
    None. Only the built-in sampler needs keys. vLLM and llama.cpp find the beginnings of prompts by themselves."""
    ends_at_next_question: bool = False
    """Whether a completion ends where the model writes the next `Question:`; see `end_early`."""
    stop: tuple[str, ...] = ()
    """A completion ends with the first token after which its text contains one of these; see `end_early`."""

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

    @property
    def turn_limit(self) -> int:
        """Maximum number of tokens of a turn, which is at most a whole conversation."""
        if self.max_turn_tokens is None:
            return self.max_tokens
        return min(self.max_turn_tokens, self.max_tokens)

    def token_limit(self, index: int) -> int:
        """Return the maximum number of tokens of the completion with this index in the call."""
        if self.max_tokens_by_prompt is None:
            return self.max_tokens
        return self.max_tokens_by_prompt[index // self.num_samples]

    @property
    def ends_early(self) -> bool:
        """Whether a completion may end before an end-of-sequence token; see `end_early`."""
        return self.ends_at_next_question or bool(self.stop)

    def before_end(self, text: str) -> str:
        """Return the text of a completion before the next question, and before the stop string that ends first."""
        if self.ends_at_next_question:
            text = plain_text.before_next_question(text)
        ranges = []  # (end, start) of each stop string in the text
        for stop in self.stop:
            start = text.find(stop)
            if start >= 0:
                ranges.append((start + len(stop), start))
        if ranges:
            _, start = min(ranges)
            text = text[:start]
        return text


@dataclass(frozen=True)
class SampledTokens:
    """One completion."""

    token_ids: list[int]
    """Sampled tokens, including the end-of-sequence token if one was sampled, the next `Question:` or a stop string."""
    text: str
    """The decoded completion, without the next `Question:` or stop string, and without special tokens but those that
    mark thoughts."""
    truncated: bool
    """Whether the completion reached the length limit before it ended."""
    logprobs: list[float] | None = field(default=None, compare=False)
    """Logprob of each token in nats, under the distribution it was sampled from (after temperature and top-p). None for
    greedy decoding and for engines that do not return logprobs."""
    asked_next_question: bool = False
    """Whether the completion ended at the next `Question:` of a plain prompt; see `end_early`."""


def end_early(tokenizer: Any, sample: SampledTokens, params: SamplingParams) -> SampledTokens:
    """Return a completion up to the next `Question:` of a plain prompt or a stop string, which its text is without.

    Its tokens include those of the `Question:` or the stop string. They are how the model has ended its answer, like an
    end-of-sequence token, so training counts their logprobs. Engines may sample more tokens; the result does not depend
    on how many.
    """
    text = params.before_end(sample.text)
    if text == sample.text:
        return sample

    # Find the smallest number of tokens that include what ends them, by bisection. All of them include it, so the
    # search is among the smaller numbers; if none of these is enough, it returns the number of all.
    smaller_numbers = range(len(sample.token_ids))
    length = bisect.bisect_left(
        smaller_numbers, True, key=lambda number: has_ended_early(tokenizer, sample.token_ids[:number], params)
    )
    asked_next_question = params.ends_at_next_question and plain_text.before_next_question(sample.text) == text
    return SampledTokens(
        token_ids=sample.token_ids[:length],
        text=text,
        truncated=False,
        logprobs=None if sample.logprobs is None else sample.logprobs[:length],
        asked_next_question=asked_next_question,
    )


def has_ended_early(tokenizer: Any, token_ids: Sequence[int], params: SamplingParams) -> bool:
    """Return whether tokens contain the next `Question:` of a plain prompt or a stop string."""
    [text] = thoughts.decode(tokenizer, [token_ids])
    return params.before_end(text) != text
