"""What a verification asks of a target, and what the target answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

IN_32_BITS = 0.0002
"""Largest mean difference between engines that compute in float32, in nats per token. SmolLM2-135M: 6e-6."""
WITH_16_BIT_CACHE = 0.01
"""The same for llama.cpp on a CPU, whose cache has 16 bits. SmolLM2-135M: 0.001."""
IN_16_BITS = 0.06
"""The same for an engine that computes in 16 bits; see `training/logprob_check.py`."""

Messages = Sequence[Mapping[str, Any]]
"""The messages of a chat prompt."""


@dataclass(frozen=True)
class Answer:
    """One completion of a target."""

    token_ids: list[int]
    """Its tokens under the adapter's tokenizer, with the end token if the target reports it."""
    logprobs: list[float] | None = None
    """Logprob of each token in nats at temperature 1, under the distribution of the whole vocabulary. None if the
    target returns none."""
    has_ended: bool = False
    """Whether the target ended the completion itself, before `max_tokens`."""
    prompt_tokens: int | None = None
    """Number of tokens of the prompt as the target counts them. None if it does not say."""


@dataclass(frozen=True)
class TargetFacts:
    """What a target says about itself, or what its files say. None and {} mean that it does not say."""

    program: str
    """What runs the model, such as `vLLM 0.32.0`, `llama.cpp b6900` or `an OpenAI-compatible server`."""
    weight_type: str | None = None
    """Type of most weights: `F32`, `BF16`, `F16`, `q8_0`, `q4_0`, `q4_k_m`, ..."""
    engine_rounding: float = IN_16_BITS
    """Largest mean difference of logprobs, in nats per token, that the arithmetic of the engine explains."""
    context_tokens: int | None = None
    end_token_ids: tuple[int, ...] | None = None
    """The tokens that end a completion."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Settings that the target uses for requests without them, by OpenAI's or the target's names: `temperature`,
    `top_p`, `top_k`, `min_p`, `repetition_penalty`, ... Only those that change what is sampled at temperature 1."""
    warnings: tuple[str, ...] = ()
    """What the target says about itself that is a mistake, in one line with its fix: an adapter with scale 0, ..."""


class Target(Protocol):
    """Something that may serve an adapter. All methods may raise a UserError or a RunError of one line."""

    name: str
    """How the user named it."""

    def facts(self) -> TargetFacts:
        """Return what the target says about itself."""

    def sample(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer | None]:
        """Return one completion of each prompt, sampled at temperature 1 from the whole vocabulary, with logprobs.

        Completions whose tokens cannot be told exactly are None. A target without logprobs decodes greedily.

        Args:
            prompts: token ids of rendered prompts, with their BOS token.
            max_tokens: maximum number of tokens of a completion.
        """

    def render(self, messages: Messages) -> list[int] | None:
        """Return the token ids of a chat prompt as the target's own chat template writes it. None if it cannot tell."""

    def chat(self, prompts: Sequence[Messages], max_tokens: int) -> list[Answer | None] | None:
        """Return a greedy completion of each chat prompt, rendered and ended by the target. None if it has no chat."""

    def close(self) -> None:
        """Release memory, and end what was started."""
