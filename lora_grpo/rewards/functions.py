"""Reward functions: what one completion is worth, each as a share of full marks.

Every function has TRL's signature `(completions, **columns) -> list[float | None]` and returns values from 0 to 1; what
full marks are worth is the number after `=` in `--rewards correct_answer=2.0`. One number so says everything, and the
mean that the trainer logs for each reward is a rate. `SCALES` holds the scales used where none is given; they are those
of the well-known GSM8K demo.

`completions` are plain strings, or conversations whose last message is the answer. `columns` are the data set's
columns, one value a completion. None means only "this row cannot be graded".

Source: the GSM8K demo by Will Brown, https://gist.github.com/willccbb/4676755236bb08cab5f4e54a0475d6fb, whose format
patterns never matched an answer of more than one line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from lora_grpo.tasks import Row, chat, code_grading, grade_all, gsm8k

RewardFunction = Callable[..., list[float | None]]

XML_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")

_INTEGER = re.compile(r"-?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)")
_XML_LAYOUT = re.compile(r"<reasoning>\n.*\n</reasoning>\n<answer>\n.*\n</answer>", re.DOTALL)
_TRAILING_CHARACTERS = 125
_SHORT_THOUGHT_CHARACTERS = 20


def completion_text(completion: Any) -> str:
    """Return the text of a completion: a string, or the content of a conversation's last message.

    Raises:
        TypeError: it is neither.
    """
    content = completion
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        content = completion[-1].get("content")
    if not isinstance(content, str):
        raise TypeError(f"expected a completion's text or messages, got {completion!r:.80}")
    return content


def correct_answer(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the row's task passes the completion, else 0; None for a row without an `answer`.

    The row's `task` column names the task, gsm8k where there is none: evaluation asks the same grader.
    """
    if "answer" not in columns:
        raise ValueError("correct_answer needs an 'answer' column in the data set")
    rows = _rows(columns, len(completions))
    by_task: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row["answer"] is not None:
            by_task[row.get("task") or "gsm8k"].append(i)
    rewards: list[float | None] = [None] * len(rows)
    for task, places in by_task.items():
        verdicts = grade_all(task, [completion_text(completions[i]) for i in places], [rows[i] for i in places])
        for i, verdict in zip(places, verdicts, strict=True):
            rewards[i] = float(verdict.passed)
    return rewards


def passes_tests(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the completion's program passes all of its row's unit tests, else 0; for rows of code tasks."""
    return [
        float(verdict is not None and verdict.passed) for _, verdict in _tested(completions, columns, count_tests=False)
    ]


def share_of_tests_passed(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """The share of its row's asserts that the completion's program passes; for rows of code tasks.

    1 only where the verdict is a pass: a program that is killed after its last assert held has at least one too few. 0
    where there was no verdict, or no code.
    """
    rewards: list[float | None] = []
    for _, verdict in _tested(completions, columns, count_tests=True):
        if verdict is None or verdict.passed or not verdict.num_tests:
            rewards.append(float(verdict is not None and verdict.passed))
        else:
            rewards.append(min(verdict.passed_tests, verdict.num_tests - 1) / verdict.num_tests)
    return rewards


def integer_answer(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the last answer marker (`<answer>`, `\\boxed{}`, `#### `) holds an integer and nothing else, else 0."""
    return [float(_is_integer(completion_text(completion))) for completion in completions]


def strict_xml_format(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the completion is laid out exactly as the xml style's system prompt shows it, else 0.

    Each tag occurs once and has a line to itself; nothing else precedes, separates or follows the two sections, except
    white space at either end.
    """
    return [float(_is_strict_xml(completion_text(completion))) for completion in completions]


def soft_xml_format(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where a reasoning section is followed by an answer section, else 0; any line breaks, any text around them."""
    return [float(_has_sections(completion_text(completion), "reasoning")) for completion in completions]


def xml_tag_count(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """A quarter for each of the four tags that occurs exactly once.

    The quarter of `</answer>` shrinks with text after it, to nothing at 125 characters. The GSM8K demo takes 0.001 off
    for each character and so falls without limit; here the worst completion is worth 0, never less.
    """
    rewards: list[float | None] = []
    for completion in completions:
        text = completion_text(completion)
        quarters = float(sum(text.count(tag) == 1 for tag in XML_TAGS))
        if text.count("</answer>") == 1:
            trailing = len(text.partition("</answer>")[2].strip())
            quarters -= min(1.0, trailing / _TRAILING_CHARACTERS)
        rewards.append(quarters / len(XML_TAGS))
    return rewards


def think_answer_format(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """1, 0.5 or 0 for `<think>...</think><answer>...</answer>`.

    1 where the completion is these two sections and nothing else, with more than 20 characters of thought and an answer
    that is not empty; 0.5 where both sections are there in this order, whatever they hold and whatever is around them.
    """
    rewards: list[float | None] = []
    for completion in completions:
        text = completion_text(completion)
        sections = chat.read_completion(text, "think")
        if sections and len(sections[0]) > _SHORT_THOUGHT_CHARACTERS and sections[1]:
            rewards.append(1.0)
        else:
            rewards.append(0.5 if _has_sections(text, "think") else 0.0)
    return rewards


def matches_pattern(pattern: str) -> RewardFunction:
    """Return a reward that is 1 where the pattern is found in the completion, else 0.

    `.` matches line breaks too; `^` and `$` are the ends of the completion, or of each line after `(?m)`.

    Raises:
        re.error: it is not a regular expression.
    """
    compiled = re.compile(pattern, re.DOTALL)

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(bool(compiled.search(completion_text(completion)))) for completion in completions]

    return reward


def longer_is_better(cap: int = 1000, unit: str = "characters") -> RewardFunction:
    """Return a reward that grows with length, length / cap, and stays at 1 from `cap` on.

    Args:
        cap: the length of full marks, at least 1.
        unit: "characters" or "tokens".
    """

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [min(1.0, length / cap) for length in _lengths(completions, unit, columns)]

    return reward


def near_length(ideal: int, unit: str = "characters") -> RewardFunction:
    """Return a reward that is 1 at the ideal length and falls evenly to 0 at length zero and at twice the ideal.

    Args:
        ideal: the length of full marks, at least 1.
        unit: "characters" or "tokens".
    """

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        lengths = _lengths(completions, unit, columns)
        return [max(0.0, 1.0 - abs(length - ideal) / ideal) for length in lengths]

    return reward


PLAIN_REWARDS: dict[str, RewardFunction] = {
    "correct_answer": correct_answer,
    "integer_answer": integer_answer,
    "strict_xml_format": strict_xml_format,
    "soft_xml_format": soft_xml_format,
    "xml_tag_count": xml_tag_count,
    "think_answer_format": think_answer_format,
    "passes_tests": passes_tests,
    "share_of_tests_passed": share_of_tests_passed,
}
"""The rewards that take no argument, by name."""

TEST_REWARDS = ("passes_tests", "share_of_tests_passed")
"""The rewards that only rows of code tasks can have."""

SCALES: dict[str, float] = {
    "correct_answer": 2.0,
    "integer_answer": 0.5,
    "strict_xml_format": 0.5,
    "soft_xml_format": 0.5,
    "xml_tag_count": 0.5,
}
"""What full marks are worth where the command line gives no scale; every other reward's is 1."""


def _tested(completions: Sequence[Any], columns: dict[str, Any], *, count_tests: bool) -> list[code_grading.Outcome]:
    texts = [completion_text(completion) for completion in completions]
    return code_grading.run_tests(texts, _rows(columns, len(texts)), count_tests=count_tests)


def _rows(columns: dict[str, Any], size: int) -> list[Row]:
    """Return the data set's columns as rows, one a completion."""
    per_row = {name: column for name, column in columns.items() if isinstance(column, list)}
    return [{name: column[i] for name, column in per_row.items()} for i in range(size)]


def _is_integer(text: str) -> bool:
    answers = gsm8k.find_answers(text) or [""]
    return bool(_INTEGER.fullmatch(answers[-1]))


def _is_strict_xml(text: str) -> bool:
    # `read_completion` has seen each tag exactly once, which also keeps the pattern's time linear.
    return chat.read_completion(text, "xml") is not None and bool(_XML_LAYOUT.fullmatch(text.strip()))


def _has_sections(text: str, thought: str) -> bool:
    """Tell whether the two sections are there, one after the other; the first place found for each tag is enough."""
    start = text.find(f"<{thought}>")
    if start < 0:
        return False
    turn = re.compile(rf"</{thought}>\s*<answer>").search(text, start)
    return turn is not None and text.find("</answer>", turn.end()) >= 0


def _lengths(completions: Sequence[Any], unit: str, columns: dict[str, Any]) -> list[int]:
    """Return each completion's length; tokens are counted as the trainer does, the end token included."""
    if unit == "characters":
        return [len(completion_text(completion)) for completion in completions]
    if "completion_ids" not in columns:
        raise ValueError("a length in tokens needs the trainer's 'completion_ids' column")
    return [len(ids) for ids in columns["completion_ids"]]
