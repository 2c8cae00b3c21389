"""Ask a target: what it samples, how it renders prompts, and where it ends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.models import ModelSpec, completion_ends, tokenizer_of
from lora_grpo.prompts import chat
from lora_grpo.verify.probes import Prompt
from lora_grpo.verify.targets import Answer, Target, TargetFacts

_NUM_CHATS = 4
"""Number of prompts that a target also answers as chats. One that only chats answers all."""
CHAT_TOKENS = 96
"""Maximum number of tokens of an answer that must be long enough to end."""
_COUNTING_TOKENS = 8
"""Maximum number of tokens of an answer of which only the number of the prompt's tokens is read."""


@dataclass(frozen=True)
class Training:
    """What the training of the adapter says about prompts and their completions."""

    spec: ModelSpec
    tokenizer: Any
    prompts: Sequence[Prompt]
    """The messages of N prompts."""
    prompt_ids: Sequence[list[int]]
    """Their token ids, rendered as in training."""
    renderings: Sequence[list[int]]
    """Token ids of the first prompt: those in `prompt_ids`, and those that the template renders if no variables, such
    as `enable_thinking`, are passed to it, as servers do."""
    sequence_tokens: int | None
    """Maximum length of a prompt and its completion; None if it is not known."""

    @functools.cached_property
    def end_token_ids(self) -> Sequence[int]:
        """The tokens that end a completion. The first call imports for a second, in which servers answer already."""
        return completion_ends(self.spec, self.tokenizer)


def training_of(spec: ModelSpec, prompts: Sequence[Prompt]) -> Training:
    """Return how prompts are rendered, and completions ended, in the training of an adapter."""
    tokenizer = tokenizer_of(spec)
    texts = [chat.render_prompt(tokenizer, prompt) for prompt in prompts]
    has_template = bool(getattr(tokenizer, "chat_template", None))
    prompt_ids: list[list[int]] = tokenizer(texts, add_special_tokens=not has_template)["input_ids"]
    renderings = prompt_ids[:1]
    if has_template:
        text = tokenizer.apply_chat_template(prompts[0], tokenize=False, add_generation_prompt=True)
        renderings = [*renderings, tokenizer(text, add_special_tokens=False)["input_ids"]]
    return Training(
        spec=spec,
        tokenizer=tokenizer,
        prompts=prompts,
        prompt_ids=prompt_ids,
        renderings=renderings,
        sequence_tokens=spec.run["config"]["model"]["max_sequence_tokens"] if spec.run else None,
    )


@dataclass(frozen=True)
class Observations:
    """What a target has answered. It is closed by now."""

    target: str
    facts: TargetFacts
    sampled: list[Answer | None]
    """A completion of each prompt; see `Target.sample`."""
    rendered: list[int] | None
    """Token ids of the first prompt as the target renders it, or None."""
    chats: list[Answer | None] | None
    """Greedy answers to the first prompts as chats. None if the target has no chat, or if they tell no more: a sampled
    completion has ended, and the target has told how it renders a prompt."""

    @property
    def only_chats(self) -> bool:
        """Whether the target answers nothing but chats."""
        return not any(self.sampled)

    @property
    def has_ended(self) -> bool:
        """Whether the target has ended a sampled completion. If not, the answers to chats are long enough to end."""
        return any(answer is not None and answer.has_ended for answer in self.sampled)


def observe(target: Target, training: Training, max_tokens: int) -> Observations:
    """Ask a target, and return its answers.

    Args:
        max_tokens: maximum number of tokens of a sampled completion.
    """
    observed = Observations(
        target=target.name,
        sampled=target.sample(training.prompt_ids, max_tokens),
        rendered=target.render(training.prompts[0]),
        facts=target.facts(),
        chats=None,
    )
    if observed.only_chats:
        chats = target.chat(training.prompts, CHAT_TOKENS)
    elif not observed.has_ended:
        chats = target.chat(training.prompts[:_NUM_CHATS], CHAT_TOKENS)
    elif observed.rendered is None:
        chats = target.chat(training.prompts[:_NUM_CHATS], _COUNTING_TOKENS)
    else:
        return observed
    return dataclasses.replace(observed, chats=chats)
