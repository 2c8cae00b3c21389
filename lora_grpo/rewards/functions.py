"""Built-in reward functions.

A reward function has TRL's signature `(completions, **columns) -> list[float | None]`. `completions` are strings, or
conversations whose last message is the answer; `columns` are the dataset's columns, one value per completion. None
means that the row cannot be graded.

Every built-in reward is between 0 and 1; the weight in `--rewards correct_answer=2.0` multiplies it. The logged mean of
a reward is therefore a rate. `DEFAULT_WEIGHTS` are those of the well-known GSM8K demo.

Source: the GSM8K demo by Will Brown, https://gist.github.com/willccbb/4676755236bb08cab5f4e54a0475d6fb, whose format
patterns never matched an answer of more than one line.
"""

from __future__ import annotations

import functools
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
    """Return the text of a completion: the string, or the content of a conversation's last message.

    Raises:
        TypeError: it is neither.
    """
    content = completion
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        content = completion[-1].get("content")
    if not isinstance(content, str):
        raise TypeError(f"expected a completion's text or messages, got {completion!r:.80}")
    return content


def _of_text(rate: Callable[[str], float]) -> RewardFunction:
    """Return the reward function that rates the text of each completion."""

    @functools.wraps(rate)
    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(rate(completion_text(completion))) for completion in completions]

    return reward


def correct_answer(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Reward 1 for a completion that the row's task passes; None for a row without an `answer`.

    The row's `task` column names the task, by default gsm8k. Evaluation uses the same grader.
    """
    if "answer" not in columns:
        raise ValueError("correct_answer needs an 'answer' column in the dataset")
    rows = _rows(columns, len(completions))
    by_task: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row["answer"] is not None:
            by_task[row.get("task") or "gsm8k"].append(i)
    rewards: list[float | None] = [None] * len(rows)
    for task, indices in by_task.items():
        verdicts = grade_all(task, [completion_text(completions[i]) for i in indices], [rows[i] for i in indices])
        for i, verdict in zip(indices, verdicts, strict=True):
            rewards[i] = float(verdict.passed)
    return rewards


def passes_tests(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Reward 1 for a program that passes all unit tests of its row; for code tasks."""
    return [float(verdict is not None and verdict.passed) for _, verdict in _run_tests(completions, columns)]


def share_of_tests_passed(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Reward the share of its row's asserts that a program passes; for code tasks.

    The reward is 1 only if the verdict is a pass: a program that is killed after its last assert lacks at least one. It
    is 0 without a verdict or without code.
    """
    rewards: list[float | None] = []
    for _, verdict in _run_tests(completions, columns, count_tests=True):
        if verdict is None or verdict.passed or not verdict.num_tests:
            rewards.append(float(verdict is not None and verdict.passed))
        else:
            rewards.append(min(verdict.passed_tests, verdict.num_tests - 1) / verdict.num_tests)
    return rewards


@_of_text
def integer_answer(text: str) -> float:
    """Reward 1 if the last answer marker (`<answer>`, `\\boxed{}`, `#### `) has an integer and nothing else."""
    answers = gsm8k.find_answers(text) or [""]
    return bool(_INTEGER.fullmatch(answers[-1]))


@_of_text
def strict_xml_format(text: str) -> float:
    """Reward 1 for exactly the layout that the xml style's system prompt shows.

    Each tag occurs once, on its own line, and there is no other text.
    """
    # `read_completion` finds each tag exactly once, which also keeps the pattern linear.
    return chat.read_completion(text, "xml") is not None and bool(_XML_LAYOUT.fullmatch(text.strip()))


@_of_text
def soft_xml_format(text: str) -> float:
    """Reward 1 for a reasoning section followed by an answer section, with any line breaks and any other text."""
    return _has_sections(text, "reasoning")


@_of_text
def xml_tag_count(text: str) -> float:
    """Reward a quarter for each of the four tags that occurs exactly once.

    Text after `</answer>` reduces its quarter, to 0 at 125 characters. In the GSM8K demo each character costs 0.001
    without limit; here no completion is below 0.
    """
    quarters = float(sum(text.count(tag) == 1 for tag in XML_TAGS))
    if text.count("</answer>") == 1:
        quarters -= min(1.0, len(text.partition("</answer>")[2].strip()) / _TRAILING_CHARACTERS)
    return quarters / len(XML_TAGS)


@_of_text
def think_answer_format(text: str) -> float:
    """Reward 1 or 0.5 for `<think>...</think><answer>...</answer>`.

    1 if there is no other text, the thought has more than 20 characters and the answer is not empty; 0.5 if both
    sections occur in this order.
    """
    sections = chat.read_completion(text, "think")
    if sections and len(sections[0]) > _SHORT_THOUGHT_CHARACTERS and sections[1]:
        return 1.0
    return 0.5 if _has_sections(text, "think") else 0.0


def matches_pattern(pattern: str) -> RewardFunction:
    """Return a reward of 1 for completions in which the regular expression matches.

    `.` matches line breaks too; `^` and `$` match at the ends of the completion, or of each line after `(?m)`.

    Raises:
        re.error: it is not a regular expression.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return _of_text(lambda text: bool(compiled.search(text)))


def longer_is_better(cap: int = 1000, unit: str = "characters") -> RewardFunction:
    """Return a reward that grows with length to 1 at `cap`.

    Args:
        cap: the length with the max reward, at least 1.
        unit: "characters" or "tokens".
    """

    return _of_length(lambda length: min(1.0, length / cap), unit)


def near_length(ideal: int, unit: str = "characters") -> RewardFunction:
    """Return a reward that is 1 at the ideal length and falls linearly to 0 at length 0 and at twice the ideal.

    Args:
        ideal: the length with the max reward, at least 1.
        unit: "characters" or "tokens".
    """

    return _of_length(lambda length: max(0.0, 1.0 - abs(length - ideal) / ideal), unit)


TEST_REWARDS = {"passes_tests": passes_tests, "share_of_tests_passed": share_of_tests_passed}
"""Rewards that need rows of code tasks, by name."""

PLAIN_REWARDS: dict[str, RewardFunction] = {
    "correct_answer": correct_answer,
    "integer_answer": integer_answer,
    "strict_xml_format": strict_xml_format,
    "soft_xml_format": soft_xml_format,
    "xml_tag_count": xml_tag_count,
    "think_answer_format": think_answer_format,
    **TEST_REWARDS,
}
"""Rewards without an argument, by name."""

LENGTH_REWARDS: dict[str, Callable[..., RewardFunction]] = {
    "near_length": near_length,
    "longer_is_better": longer_is_better,
}
"""Rewards with a length as their argument, by name."""

DEFAULT_WEIGHTS: dict[str, float] = {
    "correct_answer": 2.0,
    "integer_answer": 0.5,
    "strict_xml_format": 0.5,
    "soft_xml_format": 0.5,
    "xml_tag_count": 0.5,
}
"""Weights of rewards that are named without one; 1 for all others."""


def _run_tests(
    completions: Sequence[Any], columns: dict[str, Any], *, count_tests: bool = False
) -> list[code_grading.Outcome]:
    texts = [completion_text(completion) for completion in completions]
    return code_grading.run_tests(texts, _rows(columns, len(texts)), count_tests=count_tests)


def _rows(columns: dict[str, Any], size: int) -> list[Row]:
    """Return the dataset's columns as rows, one per completion."""
    per_row = {name: column for name, column in columns.items() if isinstance(column, list)}
    return [{name: column[i] for name, column in per_row.items()} for i in range(size)]


def _has_sections(text: str, thought: str) -> bool:
    """Return whether both sections occur in order; the first occurrence of each tag is enough, in linear time."""
    start = text.find(f"<{thought}>")
    if start < 0:
        return False
    turn = re.compile(rf"</{thought}>\s*<answer>").search(text, start)
    return turn is not None and text.find("</answer>", turn.end()) >= 0


def _of_length(rate: Callable[[int], float], unit: str) -> RewardFunction:
    """Return the reward function that rates each completion's length; tokens include the end-of-sequence token."""
    if unit == "characters":
        return _of_text(lambda text: rate(len(text)))

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if "completion_ids" not in columns:
            raise ValueError("a length in tokens needs the trainer's 'completion_ids' column")
        return [rate(len(ids)) for ids in columns["completion_ids"]]

    return reward
