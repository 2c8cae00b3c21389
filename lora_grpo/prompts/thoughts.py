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
from typing import Any

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

# Each marker with its family, and whether it opens a thought. In the pattern, longer markers come before their starts.
_MARKERS: dict[str, tuple[Family, bool]] = {}
for _family in FAMILIES:
    _MARKERS[_family.opening] = (_family, True)
    for _closing in (_family.closing, *_family.also_closing):
        _MARKERS[_closing] = (_family, False)
_MARKER = re.compile("|".join(re.escape(marker) for marker in sorted(_MARKERS, key=len, reverse=True)))

# A thought that a text opens at its end, and one that it leaves empty there.
_OPENINGS = "|".join(re.escape(family.opening) for family in FAMILIES)
_OPENED_AT_END = re.compile(rf"(?:{_OPENINGS})\s*\Z")
_EMPTY_THOUGHTS = "|".join(rf"{re.escape(family.opening)}\s*{re.escape(family.closing)}" for family in FAMILIES)
_EMPTY_AT_END = re.compile(rf"(?:{_EMPTY_THOUGHTS})\s*\Z")

_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)
_QUOTES = "'\"`"
_BLANK_LINES = re.compile(r"\A[ \t]*(?:\s*\n)?")


@dataclass(frozen=True)
class _Marker:
    """A marker in a text."""

    family: Family
    opens: bool
    start: int
    end: int


@dataclass(frozen=True)
class _Reading:
    """What is known at the end of a text."""

    answer_start: int
    """Where the text after the last closed thought starts; 0 without one."""
    open_thought: _Marker | None
    """The opening marker of the thought that is not closed."""
    open_fence: int | None
    """Where the code block of an answer starts that does not end."""


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


def without_markers(thought: str) -> str:
    """Return a thought without the markers around it, and without the blank space inside them."""
    for marker in sorted(_MARKERS, key=len, reverse=True):
        _, opens = _MARKERS[marker]
        thought = thought.strip()
        thought = thought.removeprefix(marker) if opens else thought.removesuffix(marker)
    return thought.strip()


def begun(prompt: str, prefill: str = "") -> str:
    """Return what a rendered prompt has begun of the model's turn; "" for most prompts.

    If it has opened a thought, this is the text from the opening marker on, otherwise all of `prefill`.

    Args:
        prefill: the content of the prompt's last message, if that is the assistant's. The prompt ends with it.
    """
    if not prompt.endswith(prefill):  # a base model gets the start of a program in place of the messages
        prefill = ""
    turn = prefill
    opened_by_template = _OPENED_AT_END.search(prompt.removesuffix(prefill))
    if opened_by_template:
        turn = opened_by_template[0] + prefill

    open_thought = _read(turn).open_thought
    if open_thought:
        return turn[open_thought.start :]
    return turn


def with_prefill(prompt: str, prefill: str) -> str:
    """Return a rendered prompt with the start of the model's turn.

    If that start is a thought, it takes the place of one that the chat template has begun or left empty.
    """
    if _starts_with_thought(prefill):
        prompt = _OPENED_AT_END.sub("", prompt)
        prompt = _EMPTY_AT_END.sub("", prompt)
    return prompt + prefill


def continuation(begun_text: str, reference: str, lead: str = "") -> str:
    """Return what SFT trains after a prompt, so that it is a right answer together with what the prompt has begun.

    - A reference that starts with what is begun loses that part.
    - A reference that starts with a thought of the same family, or closes one, has its reasoning in the opened thought.
    - Before any other reference, the opened thought is closed.

    Args:
        begun_text: what the prompt has begun: a result of `begun`.
        lead: the text that the chat template writes between its prompt and an answer, see `chat.answer_lead`.
    """
    if begun_text and reference.startswith(begun_text):
        return reference.removeprefix(begun_text)

    first_marker = next(_markers(reference), None)
    open_thought = _read(begun_text).open_thought
    if open_thought is None:
        lead_marker = next(_markers(lead), None)
        if first_marker and lead_marker and first_marker.family == lead_marker.family:
            return reference  # it has thoughts of its own
        return lead + reference

    # The prompt has opened a thought.
    if first_marker and first_marker.family == open_thought.family:
        if not first_marker.opens:
            return reference  # it closes the thought
        if _starts_with_thought(reference):
            reasoning = reference[first_marker.end :]
            return reasoning.lstrip("\n") if begun_text.endswith("\n") else reasoning
    closing = lead or f"\n{open_thought.family.closing}\n\n"
    return closing + reference


def _starts_with_thought(text: str) -> bool:
    first_marker = next(_markers(text), None)
    if first_marker is None or not first_marker.opens:
        return False
    return not text[: first_marker.start].strip()


def ends_a_thought(text: str) -> bool:
    """Return whether the first marker in a text is a closing one."""
    first_marker = next(_markers(text), None)
    return first_marker is not None and not first_marker.opens


def decode(tokenizer: Any, batch: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of token ids without special tokens, but with those that mark thoughts."""
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
    special_tokens = {token_id: str(token) for token_id, token in added_tokens.items() if token.special}

    # The special tokens of which the model's markers consist. A model has the markers of a family if one of its special
    # tokens begins the opening. Phi has only the first part of gpt-oss's closing, `<|end|>`, with which it ends turns.
    marker_parts: set[str] = set()
    for family in FAMILIES:
        has_markers = any(family.opening.startswith(token) for token in special_tokens.values())
        if not has_markers:
            continue
        for token in special_tokens.values():
            if token in family.opening or token in family.closing:
                marker_parts.add(token)
    if not marker_parts:
        return list(tokenizer.batch_decode(batch, skip_special_tokens=True))

    dropped_ids = {token_id for token_id, token in special_tokens.items() if token not in marker_parts}
    remaining_batch = []
    for token_ids in batch:
        remaining_batch.append([token_id for token_id in token_ids if token_id not in dropped_ids])
    return list(tokenizer.batch_decode(remaining_batch, skip_special_tokens=False))


def marker_tokens(template: str) -> list[str]:
    """Return the tokens of which the markers in a chat template consist."""
    markers = "".join(family.opening + family.closing for family in FAMILIES if family.opening in template)
    return sorted({*re.findall(r"<[^<>]+>|\[[^\[\]]+\]", markers)})


def _markers(text: str) -> Iterator[_Marker]:
    """Yield the markers in a text, except those in quotation marks or backticks, which the text only mentions."""
    for match in _MARKER.finditer(text):
        character_before = text[match.start() - 1 : match.start()]
        character_after = text[match.end() : match.end() + 1]
        if character_before and character_before in _QUOTES and character_before == character_after:
            continue
        family, opens = _MARKERS[match.group()]
        yield _Marker(family, opens, match.start(), match.end())


def _read(text: str) -> _Reading:
    """Read a text to its end. Other markers inside a thought are part of it, and those in an answer's code are code."""
    fences = [fence.start() for fence in _FENCE.finditer(text)]
    reading = _read_with_fences(text, fences)
    open_fence = reading.open_fence
    if open_fence is not None:  # the last fence of the answer opens no code block
        reading = _read_with_fences(text, [start for start in fences if start < open_fence])
    return reading


def _read_with_fences(text: str, fences: Sequence[int]) -> _Reading:
    """Read a text in which code blocks of answers start and end at fences."""
    # All fences and markers in the order of the text.
    events: list[tuple[int, _Marker | None]] = [(start, None) for start in fences]
    events += [(marker.start, marker) for marker in _markers(text)]
    events.sort(key=lambda event: event[0])

    answer_start = 0
    open_thought: _Marker | None = None
    open_fence: int | None = None
    for position, marker in events:
        if marker is None:
            # In a thought, fences do not count: the model may close it without closing the code in it.
            if open_thought is None:
                open_fence = position if open_fence is None else None
        elif open_fence is not None:
            continue
        elif open_thought is None and marker.opens:
            open_thought = marker
        elif not marker.opens and (open_thought is None or marker.family == open_thought.family):
            # The end of the open thought, or of one without an opening marker.
            open_thought = None
            answer_start = marker.end
    return _Reading(answer_start, open_thought, open_fence)
