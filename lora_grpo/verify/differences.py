"""What else differs between a target and the training of an adapter: prompts, ends, and the target's own settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.verify.observe import Training
from lora_grpo.verify.reference import Scores
from lora_grpo.verify.targets import Answer, TargetFacts

_CERTAIN_END = 0.98
"""A greedy completion must end where the adapter ends it with at least this probability."""
_LEAST_PROBABILITY = 1e-6
"""Sampled completions must not be so long that the model's are as long only with a smaller probability."""
_LARGEST_PROBABILITY = 1 - 1e-6
"""Of an end. The rounding of a target may hide the rest."""
_SHOWN_TOKENS = 8


@dataclass(frozen=True)
class Difference:
    """Something that a target does in another way than the training."""

    kind: str
    """`chat template`, `BOS`, `EOS`, `defaults`, `context`, `weights` or `server`."""
    text: str
    """What differs, and the fix, in one line."""
    changes_answers: bool
    """Whether the target's answers differ from the adapter's because of it, whatever a client sends."""


def prompt_difference(
    renderings: Sequence[Sequence[int]], rendered: Sequence[int], tokenizer: Any
) -> Difference | None:
    """Return how the prompt that a target renders from messages differs from that of the training, or None.

    Args:
        renderings: see `Training.renderings`.
        rendered: token ids of the target's prompt.
    """
    if list(rendered) in [list(rendering) for rendering in renderings]:
        return None
    expected = renderings[0]
    bos = tokenizer.bos_token_id
    if bos is not None:
        num_expected = _num_leading(expected, bos)
        num_rendered = _num_leading(rendered, bos)
        if list(expected[num_expected:]) == list(rendered[num_rendered:]):
            text = (
                f"prompts begin with {num_rendered} BOS tokens, in training with {num_expected}; correct add_bos_token "
                "in the tokenizer's settings, or the chat template that writes another one"
            )
            return Difference("BOS", text, changes_answers=True)

    position = 0
    while position < min(len(expected), len(rendered)) and expected[position] == rendered[position]:
        position += 1
    expected_text = tokenizer.decode(expected[position : position + _SHOWN_TOKENS])
    rendered_text = tokenizer.decode(rendered[position : position + _SHOWN_TOKENS])
    text = (
        f"from token {position + 1} on, prompts are {rendered_text!r}, in training {expected_text!r}; give the target "
        "the chat template of the adapter's folder"
    )
    return Difference("chat template", text, changes_answers=True)


def length_difference(expected: Sequence[int], num_tokens: int | None) -> Difference | None:
    """Return the difference if a target counts another number of tokens in a prompt than the training has."""
    if num_tokens is None or num_tokens == len(expected):
        return None
    text = (
        f"a prompt has {num_tokens} tokens, in training {len(expected)}; give the target the chat template of the "
        "adapter's folder"
    )
    return Difference("chat template", text, changes_answers=True)


def missed_end(
    answers: Sequence[Answer], scores: Sequence[Scores], end_token_ids: Sequence[int], *, is_greedy: bool
) -> Difference | None:
    """Return the difference if a target goes on where its model ends, or None.

    Where the model ends a completion with probability p, and it goes on, -log(1 - p) is added to the evidence. The sum
    is at most Exp(1) for a completion that is sampled from the model, and at most Gamma(n) for n of them. So ends that
    a target does not show are seen, too.

    Args:
        answers: completions of the target.
        scores: those of the model that it is, of the same tokens.
        end_token_ids: the tokens that end a completion in training.
        is_greedy: whether the target has decoded them greedily, or else has sampled them.
    """
    num_missed = 0
    evidence = 0.0
    for answer, row in zip(answers, scores, strict=True):
        *earlier, _ = answer.token_ids
        passed_ends = []
        for token_id, probability in zip(answer.token_ids, row.end_probabilities, strict=True):
            if token_id not in end_token_ids:
                passed_ends.append(min(probability, _LARGEST_PROBABILITY))
        evidence -= sum(math.log1p(-probability) for probability in passed_ends)
        goes_on_after_end = any(token_id in end_token_ids for token_id in earlier)
        skips_end = is_greedy and max(passed_ends, default=0) > _CERTAIN_END
        num_missed += goes_on_after_end or skips_end

    is_improbable = not is_greedy and _gamma_tail(len(answers), evidence) < _LEAST_PROBABILITY
    if not num_missed and not is_improbable:
        return None
    which = f"{num_missed} of {len(answers)}" if num_missed else "some"
    text = (
        f"{which} completions go on where the model ends them; set the target's EOS tokens to {_listed(end_token_ids)}"
    )
    return Difference("EOS", text, changes_answers=True)


def _gamma_tail(shape: int, value: float) -> float:
    """Return the probability that the sum of `shape` draws from Exp(1) is larger than a value."""
    term = math.exp(-value)
    total = 0.0
    for number in range(shape):
        total += term
        term *= value / (number + 1)
    return total


def unseen_end(num_answers: int) -> Difference:
    """Return what is said if no answer was long enough to tell where the target ends."""
    text = f"none of {num_answers} answers has ended, so the target's EOS tokens were not seen"
    return Difference("EOS", text, changes_answers=False)


def declared_differences(facts: TargetFacts, training: Training) -> list[Difference]:
    """Return the differences that a target's own settings show."""
    differences = []
    if facts.end_token_ids is not None:
        # Whether another kind of token ends a completion, not every target can tell.
        ends = [token_id for token_id in training.end_token_ids if _is_special(training.tokenizer, token_id)]
        missing = sorted(set(ends) - set(facts.end_token_ids))
        if missing:
            text = f"token {_listed(missing)} ends no completion there; add it to the target's EOS tokens"
            differences.append(Difference("EOS", text, changes_answers=True))
    if facts.sampling_defaults:
        settings = ", ".join(f"{name} {value:g}" for name, value in facts.sampling_defaults.items())
        text = f"requests that do not set them are sampled with {settings}; send temperature, top_p and the others"
        differences.append(Difference("defaults", text, changes_answers=False))
    trained_tokens = training.sequence_tokens
    if facts.context_tokens and trained_tokens and facts.context_tokens < trained_tokens:
        text = f"the context has {facts.context_tokens} tokens, in training {trained_tokens}; serve with a longer one"
        differences.append(Difference("context", text, changes_answers=False))
    if facts.weight_type and facts.weight_type.lower() not in ("f32", "float32", "bf16", "f16", "bfloat16", "float16"):
        text = f"weights are {facts.weight_type}, so answers differ by rounding"
        differences.append(Difference("weights", text, changes_answers=False))
    for warning in facts.warnings:
        differences.append(Difference("server", warning, changes_answers=False))
    return differences


def _is_special(tokenizer: Any, token_id: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(token_id)
    return token_id in tokenizer.all_special_ids or bool(added and added.special)


def _num_leading(token_ids: Sequence[int], token_id: int) -> int:
    number = 0
    while number < len(token_ids) and token_ids[number] == token_id:
        number += 1
    return number


def _listed(token_ids: Sequence[int]) -> str:
    return ", ".join(map(str, token_ids))
