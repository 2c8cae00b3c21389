"""Prompt styles: the formats of answers that system prompts ask for. Write and read completions in them."""

import re
from typing import NamedTuple

from lora_grpo.prompts import thoughts

SYSTEM_PROMPTS: dict[str, str] = {
    "xml": "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>",
    "hashes": "Solve the problem step by step. End with the final answer on its own line after '#### '.",
    "boxed": "Reason step by step. Put the final answer within \\boxed{}.",
    "think": "Think first, then answer, in this format:\n<think>...</think>\n<answer>...</answer>",
    "code": "Answer with one Python code block:\n```python\n...\n```",
}
"""The system prompt of each prompt style. The style also determines the format that GSM8K's strict rule accepts."""

_COMPLETIONS = {
    "xml": "<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>",
    "hashes": "{}\n#### {}",
    "boxed": "{}\n\\boxed{{{}}}",
    "think": "<think>{}</think>\n<answer>{}</answer>",
    "code": "{}\n```python\n{}\n```",
}
"""A completion of each style, with places for the reasoning and the answer."""

DEFAULT_STYLE = "xml"


class Sections(NamedTuple):
    """The two parts of a completion, without whitespace around them."""

    reasoning: str
    answer: str


def write_completion(reasoning: str, answer: str, style: str = DEFAULT_STYLE) -> str:
    """Return a completion in the given style. `read_completion` parses it."""
    return _COMPLETIONS[style].format(reasoning, answer).removeprefix("\n")


def read_completion(text: str, style: str = DEFAULT_STYLE) -> Sections | None:
    """Split a completion into reasoning and answer. Return None if the completion does not follow the style.

    Only whitespace may appear before, between, and after the sections. In styles other than `think`, the model's
    thoughts may come first, if they are closed. `xml` and `think` must contain each of their four tags exactly once.
    `hashes` must have a single `####`, at the start of the last line, and `boxed` a single box on the last line.
    `grading/code_extraction.py` reads programs.
    """
    if style == "think":  # its thoughts are the reasoning
        return _read_sections(text.strip(), "think")

    answer_text = thoughts.answer_of(text)
    if answer_text is None:
        return None
    answer_text = answer_text.strip()
    if style == "hashes":
        return _read_hashes(answer_text)
    if style == "boxed":
        return _read_box(answer_text)
    return _read_sections(answer_text, "reasoning")


def _read_hashes(text: str) -> Sections | None:
    reasoning, _, last_line = text.rpartition("\n")
    if text.count("####") != 1 or not last_line.startswith("#### "):
        return None
    return Sections(reasoning.strip(), last_line.removeprefix("#### ").strip())


def _read_box(text: str) -> Sections | None:
    reasoning, _, after_brace = text.rpartition("\\boxed{")
    box = re.fullmatch(r"(.*)\}[$. ]*", after_brace)
    if box is None or "\\boxed" in reasoning:
        return None
    return Sections(reasoning.strip(), box[1].strip())


def _read_sections(text: str, reasoning_tag: str) -> Sections | None:
    # Each tag occurs once, so that the pattern takes linear time also on a completion full of tags.
    for tag in (f"<{reasoning_tag}>", f"</{reasoning_tag}>", "<answer>", "</answer>"):
        if text.count(tag) != 1:
            return None
    pattern = rf"<{reasoning_tag}>(.*?)</{reasoning_tag}>\s*<answer>(.*?)</answer>"
    sections = re.fullmatch(pattern, text, re.DOTALL)
    if sections is None:
        return None
    return Sections(sections[1].strip(), sections[2].strip())
