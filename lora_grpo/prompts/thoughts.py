"""Thoughts: what a prompt has begun of the model's turn, where a thought ends, and what is graded.

One rule for all tasks, in rewards, evaluation, SFT, the audit and the preview (docs/decisions/0033-thoughts.md):

- What the prompt has begun belongs to the completion. Many templates end a prompt with `<think>`; a prompt may also end
  with a message of the assistant, which the model continues. A thought that the prompt opened and closed is not begun.
- Only what follows the last closed thought is graded. A closing marker without an opening one also ends a thought.
- A thought that is not closed has no answer: the verdict `UNFINISHED`, whatever the thought contains.
- A marker in quotes or backticks, or in a code block of the answer, is none: `text.split("</think>")` is a program.

`FAMILIES` lists the markers. The texts of completions keep them, even where they are special tokens (`decode`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

UNFINISHED = "unfinished_thought"
"""The reason of a verdict on a completion whose thought is not closed."""


@dataclass(frozen=True)
class Family:
    """How the models of a family mark their thoughts."""

    opening: str
    closing: str
    """What the model writes between a thought and the answer."""
    also_closing: tuple[str, ...] = ()
    """Other texts that end a thought."""


FAMILIES = (
    # Qwen3, Qwen3.5, DeepSeek-R1-Distill, SmolLM3, LFM2.5, OLMo 3, GLM-Z1, EXAONE 4, Phi-4-reasoning, Granite.
    Family("<think>", "</think>"),
    # Magistral, Ministral 3 Reasoning.
    Family("[THINK]", "[/THINK]"),
    # Gemma 4, whose thoughts are a channel.
    Family("<|channel>thought", "<channel|>"),
    # gpt-oss. Its thought is a message of its own. A tool call or the answer follows, as another message.
    Family(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        ("<|end|><|start|>assistant", "<|channel|>final<|message|>"),
    ),
    # Seed-OSS.
    Family("<seed:think>", "</seed:think>"),
    # Command A Reasoning.
    Family("<|START_THINKING|>", "<|END_THINKING|>"),
    # Apertus.
    Family("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""Of the models that can be trained. Sources: the chat templates of TRL 1.14 and the reasoning parsers of vLLM."""

_MARKERS = {family.opening: (family, True) for family in FAMILIES}
_MARKERS |= {text: (family, False) for family in FAMILIES for text in (family.closing, *family.also_closing)}
_MARKER = re.compile("|".join(map(re.escape, sorted(_MARKERS, key=len, reverse=True))))
_OPENINGS = "|".join(re.escape(family.opening) for family in FAMILIES)
_EMPTY_THOUGHTS = "|".join(rf"{re.escape(each.opening)}\s*{re.escape(each.closing)}" for each in FAMILIES)
_OPENED_AT_END = re.compile(rf"(?:{_OPENINGS})\s*\Z")
_EMPTY_AT_END = re.compile(rf"(?:{_EMPTY_THOUGHTS})\s*\Z")
_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)
_QUOTES = "'\"`"
_BLANK_LINES = re.compile(r"\A[ \t]*(?:\s*\n)?")


class _Marker(NamedTuple):
    family: Family
    opens: bool
    start: int
    end: int


class _Reading(NamedTuple):
    """How far a text has come."""

    answer_start: int
    """Where the text after the last closed thought starts; 0 without one."""
    open_thought: _Marker | None
    """The opening marker of the thought that is not closed."""


def answer_of(text: str) -> str | None:
    """Return what is graded of a completion: the text after its thoughts; None if the last one is not closed.

    A text without thoughts is returned as it is. After a thought, blank lines are left out, but not indentation.
    """
    reading = _read(text)
    if reading.open_thought:
        return None
    if not reading.answer_start:
        return text
    return _BLANK_LINES.sub("", text[reading.answer_start :], count=1)


def answer_start(text: str) -> int | None:
    """Return where the text after the last closed thought starts: 0 without one, None if a thought is not closed."""
    reading = _read(text)
    return None if reading.open_thought else reading.answer_start


def begun(prompt: str, prefill: str = "") -> str:
    """Return what a rendered prompt has begun of the model's turn; "" for most prompts.

    If it has opened a thought, this is the text from the opening marker on, otherwise all of `prefill`.

    Args:
        prefill: the content of the prompt's last message, if that is the assistant's. The prompt ends with it.
    """
    if not prompt.endswith(prefill):  # a base model gets the start of a program in place of the messages
        prefill = ""
    by_template = _OPENED_AT_END.search(prompt.removesuffix(prefill))
    turn = (by_template[0] if by_template else "") + prefill
    open_thought = _read(turn).open_thought
    return turn[open_thought.start :] if open_thought else turn


def with_prefill(prompt: str, prefill: str) -> str:
    """Return a rendered prompt with the start of the model's turn.

    If that start is a thought, it takes the place of one that the chat template has begun or left empty.
    """
    first = next(_markers(prefill), None)
    if first and first.opens and not prefill[: first.start].strip():
        prompt = _EMPTY_AT_END.sub("", _OPENED_AT_END.sub("", prompt))
    return prompt + prefill


def continuation(begun: str, reference: str, lead: str = "") -> str:
    """Return what SFT trains after a prompt, so that it is a right answer together with what the prompt has begun.

    - A reference that starts with what is begun loses that part.
    - A reference that starts with a thought of the same family, or closes one, has its reasoning in the opened thought.
    - Before any other reference, the opened thought is closed.

    Args:
        begun: result of `begun`.
        lead: the text that the chat template writes between its prompt and an answer, see `chat.answer_lead`.
    """
    if begun and reference.startswith(begun):
        return reference.removeprefix(begun)
    first = next(_markers(reference), None)
    open_thought = _read(begun).open_thought
    if open_thought is None:
        ends_thought = next(_markers(lead), None)
        has_its_own = first and ends_thought and first.family == ends_thought.family
        return reference if has_its_own else lead + reference
    family = open_thought.family
    if first and first.family == family and not first.opens:
        return reference
    if first and first.family == family and not reference[: first.start].strip():
        reasoning = reference[first.end :]
        return reasoning.lstrip("\n") if begun.endswith("\n") else reasoning
    return (lead or f"\n{family.closing}\n\n") + reference


def ends_a_thought(text: str) -> bool:
    """Return whether the first marker in a text is a closing one."""
    first = next(_markers(text), None)
    return first is not None and not first.opens


def decode(tokenizer: Any, batch: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of token ids without special tokens, but with those that mark thoughts."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: str(token) for number, token in added.items() if token.special}
    kept: set[str] = set()
    for family in FAMILIES:
        if any(family.opening.startswith(token) for token in special.values()):
            kept |= {token for token in special.values() if token in family.opening or token in family.closing}
    if not kept:
        return list(tokenizer.batch_decode(batch, skip_special_tokens=True))
    dropped = {number for number, token in special.items() if token not in kept}
    marked = [[number for number in ids if number not in dropped] for ids in batch]
    return list(tokenizer.batch_decode(marked, skip_special_tokens=False))


def marker_tokens(template: str) -> list[str]:
    """Return the tokens of which the markers in a chat template consist."""
    markers = "".join(family.opening + family.closing for family in FAMILIES if family.opening in template)
    return sorted({*re.findall(r"<[^<>]+>|\[[^\[\]]+\]", markers)})


def _markers(text: str) -> Iterator[_Marker]:
    """Yield the markers in a text, except those in quotation marks or backticks, which the text only mentions."""
    for match in _MARKER.finditer(text):
        before = text[match.start() - 1 : match.start()]
        after = text[match.end() : match.end() + 1]
        if before and before in _QUOTES and before == after:
            continue
        family, opens = _MARKERS[match.group()]
        yield _Marker(family, opens, match.start(), match.end())


def _read(text: str) -> _Reading:
    """Read a text to its end. Other markers inside a thought are part of it, and those in an answer's code are code."""
    fences = [fence.start() for fence in _FENCE.finditer(text)]
    reading, unclosed = _read_with_fences(text, fences)
    if unclosed is not None:  # the last fence of the answer opens no code block
        reading, _ = _read_with_fences(text, [start for start in fences if start < unclosed])
    return reading


def _read_with_fences(text: str, fences: Sequence[int]) -> tuple[_Reading, int | None]:
    """Read a text in which code blocks of answers start and end at fences.

    Returns:
        The reading, and the start of the fence whose code block does not end, or None.
    """
    answer_start = 0
    open_thought: _Marker | None = None
    code_block: int | None = None  # the start of the one that the reading is in
    passed_fences = 0
    for marker in [*_markers(text), None]:
        end = marker.start if marker else len(text)
        while passed_fences < len(fences) and fences[passed_fences] < end:
            if open_thought is None:  # the model may close a thought without closing the code in it
                code_block = fences[passed_fences] if code_block is None else None
            passed_fences += 1
        if marker is None or code_block is not None:
            continue
        if open_thought is None and marker.opens:
            open_thought = marker
        elif open_thought is None or (marker.family == open_thought.family and not marker.opens):
            open_thought = None
            answer_start = marker.end
    return _Reading(answer_start, open_thought), code_block
