"""Compare what a target has answered with what the adapter and its base compute for the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_grpo.errors import UserError
from lora_grpo.verify.differences import (
    Difference,
    declared_differences,
    length_difference,
    missed_end,
    prompt_difference,
    unseen_end,
)
from lora_grpo.verify.observe import Observations, Training
from lora_grpo.verify.reference import Precision, Reference, Scores, Text, bits_of
from lora_grpo.verify.report import TargetReport
from lora_grpo.verify.targets import IN_32_BITS
from lora_grpo.verify.verdict import Choices, Verdict, judge, judge_choices

_UNKNOWN_BITS = 16
"""Bits of the weights of a target that does not tell them."""
_CLOSE = 0.1
"""Nothing else fits better if a target differs from the adapter by less than this part of the adapter's movement."""
_SCALES = {"the adapter at half of its scale": 0.5, "the adapter at twice its scale": 2.0}


def compare(
    observed: Observations,
    training: Training,
    reference: Reference,
    other_adapters: Mapping[str, Path],
    weight_bits: int | None = None,
) -> TargetReport:
    """Return what a target is, and what else differs.

    Args:
        other_adapters: folders of adapters of the same shape that the target may use instead, by their names.
        weight_bits: bits of the target's weights, in place of what it says.

    Raises:
        UserError: no answer of the target can be compared.
    """
    answers = observed.sampled
    if not any(answers):
        answers = observed.chats or []  # of a server that only chats
    texts = []
    logprobs = []
    for prompt_ids, answer in zip(training.prompt_ids, answers, strict=False):
        if answer is None or not answer.token_ids:
            continue
        has_read_prompt = answer.prompt_tokens in (None, len(prompt_ids))
        if has_read_prompt:  # without another BOS token, and not truncated
            texts.append(Text(prompt_ids, answer.token_ids))
            logprobs.append(answer.logprobs)
    if not texts:
        raise UserError(
            f"{observed.target} has sampled no tokens that can be compared; check that it has the adapter's tokenizer, "
            "adds no BOS token and truncates no prompt, or pass other --prompts"
        )

    known_logprobs = [row for row in logprobs if row is not None]
    result: Verdict | Choices
    if len(known_logprobs) == len(texts):
        engine_rounding = IN_32_BITS if weight_bits == 32 else observed.facts.engine_rounding
        bits = weight_bits or bits_of(observed.facts.weight_type) or _UNKNOWN_BITS
        precision = Precision(bits, engine_rounding)
        result = _judge_logprobs(texts, known_logprobs, precision, reference, other_adapters)
    else:
        result = _judge_choices(texts, reference)
    return TargetReport(
        target=observed.target,
        program=observed.facts.program,
        weight_type=observed.facts.weight_type,
        result=result,
        differences=tuple(_differences(observed, training, reference)),
    )


def _judge_logprobs(
    texts: Sequence[Text],
    logprobs: Sequence[Sequence[float]],
    precision: Precision,
    reference: Reference,
    other_adapters: Mapping[str, Path],
) -> Verdict:
    """Return the verdict on a target that reports logprobs."""
    base_scores = reference.score(texts, scale=0)
    adapter_scores = reference.score(texts)
    rounding = reference.rounding(texts, precision, base_scores, adapter_scores)
    base = _logprobs(base_scores)
    adapter = _logprobs(adapter_scores)
    verdict = judge(logprobs, base, adapter, {}, rounding)

    # What else may the target be? Rounding may hide that it is not the adapter.
    is_close = verdict.from_adapter < verdict.moved * _CLOSE
    if verdict.finding in ("the base", "cannot tell") or (verdict.finding == "the adapter" and is_close):
        return verdict
    alternatives = {name: _logprobs(reference.score(texts, scale)) for name, scale in _SCALES.items()}
    for name, folder in other_adapters.items():
        alternatives[name] = _logprobs(reference.score(texts, adapter=folder))
    return judge(logprobs, base, adapter, alternatives, rounding)


def _judge_choices(texts: Sequence[Text], reference: Reference) -> Choices:
    """Return the verdict on a target that decodes greedily and reports no logprobs."""
    base = reference.score(texts, scale=0)
    adapter = reference.score(texts)
    return judge_choices(
        [is_greedy for row in adapter for is_greedy in row.is_greedy],
        [is_greedy for row in base for is_greedy in row.is_greedy],
    )


def _logprobs(scores: Sequence[Scores]) -> list[list[float]]:
    return [row.logprobs for row in scores]


def _differences(observed: Observations, training: Training, reference: Reference) -> list[Difference]:
    """Return what differs besides the weights."""
    declared = declared_differences(observed.facts, training)
    prompt = None
    if observed.rendered is not None:
        prompt = prompt_difference(training.renderings, observed.rendered, training.tokenizer)

    # The answers to chats, whose prompts the target has rendered.
    answers = []
    texts = []
    for prompt_ids, answer in zip(training.prompt_ids, observed.chats or (), strict=False):
        if answer is None:
            continue
        if prompt is None and observed.rendered is None:
            prompt = length_difference(prompt_ids, answer.prompt_tokens)
        if answer.token_ids:
            answers.append(answer)
            texts.append(Text(prompt_ids, answer.token_ids))
    if prompt is not None:
        return [prompt, *declared]
    says_ends = any(difference.kind == "EOS" for difference in declared)
    if not texts or says_ends:
        return declared
    end = missed_end(answers, reference.score(texts), training.end_token_ids)
    if end is None and observed.facts.end_token_ids is None and not any(answer.has_ended for answer in answers):
        end = unseen_end(len(answers))
    return declared if end is None else [end, *declared]
