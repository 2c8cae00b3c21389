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
from lora_grpo.verify.targets import IN_32_BITS, Answer
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
    if observed.only_chats:
        answers = observed.chats or []  # of a server that only chats
    completions = []
    texts = []
    for prompt_ids, answer in zip(training.prompt_ids, answers, strict=False):
        if answer is None or not answer.token_ids:
            continue
        has_read_prompt = answer.prompt_tokens in (None, len(prompt_ids))
        if has_read_prompt:  # without another BOS token, and not truncated
            completions.append(answer)
            texts.append(Text(prompt_ids, answer.token_ids))
    if not texts:
        raise UserError(
            f"{observed.target} has sampled no tokens that can be compared; check that it has the adapter's tokenizer, "
            "adds no BOS token and truncates no prompt, or pass other --prompts"
        )
    base_scores = reference.score(texts, scale=0)
    adapter_scores = reference.score(texts)

    logprobs = [answer.logprobs for answer in completions if answer.logprobs is not None]
    has_logprobs = len(logprobs) == len(completions)
    result: Verdict | Choices
    if has_logprobs:
        engine_rounding = IN_32_BITS if weight_bits == 32 else observed.facts.engine_rounding
        bits = weight_bits or bits_of(observed.facts.weight_type) or _UNKNOWN_BITS
        rounding = reference.rounding(texts, Precision(bits, engine_rounding), base_scores, adapter_scores)
        base, adapter = _logprobs(base_scores), _logprobs(adapter_scores)
        result = _judge_logprobs(texts, logprobs, base, adapter, rounding, reference, other_adapters)
    else:
        result = judge_choices(_choices(adapter_scores), _choices(base_scores))

    declared = declared_differences(observed.facts, training)
    prompt = _prompt_difference(observed, training)
    end = None
    declares_end = any(difference.kind == "EOS" for difference in declared)
    if result.finding != "neither" and not declares_end:  # where other weights end is not known
        is_base = result.finding == "the base"
        chats = [] if prompt or observed.only_chats or observed.has_ended else _readable_chats(observed, training)
        is_greedy = bool(chats) or observed.only_chats or not has_logprobs
        if chats:
            # Sampled completions have not ended, or only chats have what ends them.
            texts = [text for text, _ in chats]
            completions = [answer for _, answer in chats]
            scores = reference.score(texts, scale=0 if is_base else 1)
        else:
            scores = base_scores if is_base else adapter_scores
        end = missed_end(completions, scores, training.end_token_ids, is_greedy=is_greedy)
        declares_none = observed.facts.end_token_ids is None
        if end is None and declares_none and not any(answer.has_ended for answer in completions):
            end = unseen_end(len(completions))
    return TargetReport(
        target=observed.target,
        program=observed.facts.program,
        weight_type=observed.facts.weight_type,
        result=result,
        differences=tuple(difference for difference in (prompt, end, *declared) if difference is not None),
    )


def _judge_logprobs(
    texts: Sequence[Text],
    logprobs: Sequence[Sequence[float]],
    base: Sequence[Sequence[float]],
    adapter: Sequence[Sequence[float]],
    rounding: float,
    reference: Reference,
    other_adapters: Mapping[str, Path],
) -> Verdict:
    """Return the verdict on a target that reports logprobs."""
    verdict = judge(logprobs, base, adapter, {}, rounding)

    # What else may the target be? Rounding may hide that it is not the adapter.
    is_close = verdict.from_adapter < verdict.moved * _CLOSE
    if verdict.finding in ("the base", "cannot tell") or (verdict.finding == "the adapter" and is_close):
        return verdict
    alternatives = {name: _logprobs(reference.score(texts, scale)) for name, scale in _SCALES.items()}
    for name, folder in other_adapters.items():
        alternatives[name] = _logprobs(reference.score(texts, adapter=folder))
    return judge(logprobs, base, adapter, alternatives, rounding)


def _logprobs(scores: Sequence[Scores]) -> list[list[float]]:
    return [row.logprobs for row in scores]


def _choices(scores: Sequence[Scores]) -> list[bool]:
    return [is_greedy for row in scores for is_greedy in row.is_greedy]


def _prompt_difference(observed: Observations, training: Training) -> Difference | None:
    """Return how the prompts that the target renders from chats differ from those of the training, or None."""
    if observed.rendered is not None:
        return prompt_difference(training.renderings, observed.rendered, training.tokenizer)
    for prompt_ids, answer in zip(training.prompt_ids, observed.chats or (), strict=False):
        difference = length_difference(prompt_ids, answer.prompt_tokens if answer else None)
        if difference is not None:
            return difference
    return None


def _readable_chats(observed: Observations, training: Training) -> list[tuple[Text, Answer]]:
    """Return the answers to chats whose tokens are known, with their prompts."""
    chats = []
    for prompt_ids, answer in zip(training.prompt_ids, observed.chats or (), strict=False):
        if answer is not None and answer.token_ids:
            chats.append((Text(prompt_ids, answer.token_ids), answer))
    return chats
