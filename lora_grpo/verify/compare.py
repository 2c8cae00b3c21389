"""Compare what a target has answered with what the adapter and its base compute for the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Scored:
    """The answers of a target that can be compared, and their scores. All sequences have the same order."""

    answers: list[Answer]
    texts: list[Text]
    base: list[Scores]
    adapter: list[Scores]

    @property
    def logprobs(self) -> list[list[float]] | None:
        """What the target says of its tokens; None if it does not say it of all answers."""
        logprobs = [answer.logprobs for answer in self.answers if answer.logprobs is not None]
        return logprobs if len(logprobs) == len(self.answers) else None


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
    scored = _score(observed, training, reference)
    result: Verdict | Choices
    if scored.logprobs is None:
        result = judge_choices(_choices(scored.adapter), _choices(scored.base))
    else:
        engine_rounding = IN_32_BITS if weight_bits == 32 else observed.facts.engine_rounding
        bits = weight_bits or bits_of(observed.facts.weight_type) or _UNKNOWN_BITS
        precision = Precision(bits, engine_rounding)
        result = _judge_logprobs(scored, scored.logprobs, precision, reference, other_adapters)

    declared = declared_differences(observed.facts, training)
    prompt = _prompt_difference(observed, training)
    end = None
    declares_end = any(difference.kind == "EOS" for difference in declared)
    if result.finding != "neither" and not declares_end:  # where other weights end is not known
        is_base = result.finding == "the base"
        end = _end_difference(observed, training, reference, scored, is_base=is_base, has_same_prompt=prompt is None)
    return TargetReport(
        target=observed.target,
        program=observed.facts.program,
        weight_type=observed.facts.weight_type,
        result=result,
        differences=tuple(difference for difference in (prompt, end, *declared) if difference is not None),
    )


def _score(observed: Observations, training: Training, reference: Reference) -> _Scored:
    """Score the answers that can be compared with the base and the adapter, or raise a UserError if there are none."""
    all_answers = observed.sampled
    if observed.only_chats:
        all_answers = observed.chats or []  # of a server that only chats
    answers = []
    texts = []
    for prompt_ids, answer in zip(training.prompt_ids, all_answers, strict=False):
        if answer is None or not answer.token_ids:
            continue
        has_read_prompt = answer.prompt_tokens in (None, len(prompt_ids))
        if has_read_prompt:  # without another BOS token, and not truncated
            answers.append(answer)
            texts.append(Text(prompt_ids, answer.token_ids))
    if not texts:
        raise UserError(
            f"{observed.target} has sampled no tokens that can be compared; check that it has the adapter's tokenizer, "
            "adds no BOS token and truncates no prompt, or pass other --prompts"
        )
    return _Scored(answers, texts, base=reference.score(texts, scale=0), adapter=reference.score(texts))


def _judge_logprobs(
    scored: _Scored,
    logprobs: Sequence[Sequence[float]],
    precision: Precision,
    reference: Reference,
    other_adapters: Mapping[str, Path],
) -> Verdict:
    """Return the verdict on a target that reports logprobs, with weights of a precision."""
    rounding = reference.rounding(scored.texts, precision, scored.base, scored.adapter)
    base = _logprobs(scored.base)
    adapter = _logprobs(scored.adapter)
    verdict = judge(logprobs, base, adapter, {}, rounding)

    # What else may the target be? Rounding may hide that it is not the adapter.
    is_close = verdict.from_adapter < verdict.moved * _CLOSE
    if verdict.finding in ("the base", "cannot tell") or (verdict.finding == "the adapter" and is_close):
        return verdict
    alternatives = {name: _logprobs(reference.score(scored.texts, scale)) for name, scale in _SCALES.items()}
    for name, folder in other_adapters.items():
        alternatives[name] = _logprobs(reference.score(scored.texts, adapter=folder))
    return judge(logprobs, base, adapter, alternatives, rounding)


def _end_difference(
    observed: Observations,
    training: Training,
    reference: Reference,
    scored: _Scored,
    *,
    is_base: bool,
    has_same_prompt: bool,
) -> Difference | None:
    """Return how the target's answers fail to end where those of the adapter or the base do, or None.

    Args:
        is_base: whether the target is the base.
        has_same_prompt: whether it renders chats as the training did.
    """
    chats = []
    if has_same_prompt and not observed.only_chats and not observed.has_ended:
        # Sampled completions have not ended, or only chats have what ends them.
        chats = _readable_chats(observed, training)
    answers = scored.answers
    scores = scored.base if is_base else scored.adapter
    if chats:
        answers = [answer for _, answer in chats]
        scores = reference.score([text for text, _ in chats], scale=0 if is_base else 1)
    is_greedy = bool(chats) or observed.only_chats or scored.logprobs is None
    end = missed_end(answers, scores, training.end_token_ids, is_greedy=is_greedy)
    declares_none = observed.facts.end_token_ids is None
    if end is None and declares_none and not any(answer.has_ended for answer in answers):
        return unseen_end(len(answers))
    return end


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
