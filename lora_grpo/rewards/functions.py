"""Built-in reward functions.

A reward function has TRL's signature `(completions, **columns) -> list[float | None]`. `completions` are strings or
conversations that end with the answer, with what the prompt has begun of it, such as `<think>`. `columns` are the rows'
columns, with one value per completion, and the grader's `verdicts`. None means that the row cannot be graded.

Every built-in reward except the last three is between 0 and 1 and is multiplied by its weight, as in `--rewards
correct_answer=2.0`. The logged mean is unweighted and is therefore a rate. `DEFAULT_WEIGHTS` match the GSM8K demo.

Sources: the GSM8K demo by Will Brown, https://gist.github.com/willccbb/4676755236bb08cab5f4e54a0475d6fb, whose format
patterns never match an answer with more than one line; `trl.rewards`, TRL 1.14.2; and open-r1,
https://github.com/huggingface/open-r1 (`src/open_r1/rewards.py`).
"""

import functools
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from lora_grpo.grading import find_answers
from lora_grpo.prompts import styles, thoughts

RewardFunction = Callable[..., list[float | None]]

_XML_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_INTEGER = re.compile(r"-?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)")
_XML_LAYOUT = re.compile(r"<reasoning>\n.*\n</reasoning>\n<answer>\n.*\n</answer>", re.DOTALL)
_TRAILING_CHARACTERS = 125
_SHORT_THOUGHT_CHARACTERS = 20


def completion_text(completion: Any) -> str:
    """Return the text of a completion: the string itself, or the content of the last message of a conversation."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _of_text(rate: Callable[[str], float]) -> RewardFunction:
    @functools.wraps(rate)
    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(rate(completion_text(completion))) for completion in completions]

    return reward


def _of_answer(rate: Callable[[str], float]) -> RewardFunction:
    """Return a reward for what follows the model's thoughts: 0 if a thought is not closed, as for graders."""

    @functools.wraps(rate)
    def rate_answer(text: str) -> float:
        answer = thoughts.answer_of(text)
        return 0.0 if answer is None else rate(answer.strip())

    return _of_text(rate_answer)


def correct_answer(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Reward a completion by the `check` of the rows' task, which evaluation uses too: 1 or 0, or its score."""
    return [verdict.value for verdict in columns["verdicts"]]


def passes_tests(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Reward 1 for a program that passes all unit tests of its row. Requires a code task."""
    return [float(verdict.passed) for verdict in columns["verdicts"]]


def share_of_tests_passed(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Reward the fraction of the row's asserts that a program passes. Requires a code task.

    An assert that never runs, such as one in a loop over an empty result, did not pass. The reward is 1 only if the
    verdict is a pass: a program that is killed after its last assert loses one assert.

    Asserts in `try` and `with` statements and methods such as unittest's `assertEqual` are not counted. A row without
    other asserts is scored like `passes_tests`, even if none of them ran.
    """
    rewards: list[float | None] = []
    for verdict in columns["verdicts"]:
        passed_tests, num_tests = verdict.tests
        most = num_tests if verdict.passed else num_tests - 1
        rewards.append(min(passed_tests, most) / num_tests if num_tests else float(verdict.passed))
    return rewards


@_of_answer
def integer_answer(text: str) -> float:
    """Reward 1 if the last answer marker (`<answer>`, `\\boxed{}`, or `#### `) contains only an integer."""
    answers = find_answers(text) or [""]
    return bool(_INTEGER.fullmatch(answers[-1]))


@_of_answer
def strict_xml_format(text: str) -> float:
    """Reward 1 for the exact layout in the system prompt of the xml style.

    Each tag must occur once, on its own line. No other text is allowed, except the model's thoughts before it.
    """
    # `read_completion` checks that each tag occurs exactly once, which also makes the pattern run in linear time.
    return styles.read_completion(text, "xml") is not None and bool(_XML_LAYOUT.fullmatch(text))


@_of_answer
def soft_xml_format(text: str) -> float:
    """Reward 1 for a reasoning section followed by an answer section. Line breaks and other text are allowed."""
    return _has_sections(text, "reasoning")


@_of_answer
def xml_tag_count(text: str) -> float:
    """Reward 0.25 for each of the four tags that occurs exactly once.

    Text after `</answer>` reduces the value of that tag, to 0 at 125 characters. In the GSM8K demo, the cost of such
    text has no limit.
    """
    quarters = float(sum(text.count(tag) == 1 for tag in _XML_TAGS))
    if text.count("</answer>") == 1:
        quarters -= min(1.0, len(text.partition("</answer>")[2].strip()) / _TRAILING_CHARACTERS)
    return quarters / len(_XML_TAGS)


@_of_text
def think_answer_format(text: str) -> float:
    """Reward the format `<think>...</think><answer>...</answer>` with 1, 0.5, or 0.

    The reward is 1 if there is no other text, the thinking has more than 20 characters, and the answer is not empty. It
    is 0.5 if both sections occur in this order, and otherwise 0.
    """
    sections = styles.read_completion(text, "think")
    if sections and len(sections[0]) > _SHORT_THOUGHT_CHARACTERS and sections[1]:
        return 1.0
    return 0.5 if _has_sections(text, "think") else 0.0


def coin_flip(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return 1 or 0 with equal probability. Use it as a control: it has no signal, so any gain is due to chance.

    The same completion of the same row always gets the same reward.
    """
    ids = columns.get("id") or [""] * len(completions)
    texts = [f"{row}\0{completion_text(completion)}" for row, completion in zip(ids, completions, strict=True)]
    return [float(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[0] % 2) for text in texts]


def matches_pattern(pattern: str) -> RewardFunction:
    """Return a reward function that returns 1 if the regular expression matches anywhere in the completion.

    The completion includes thoughts. `.` also matches line breaks. `^` and `$` match at the start and end of
    the completion, or of each line with `(?m)`.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return _of_text(lambda text: bool(compiled.search(text)))


def longer_is_better(cap: int = 1000, unit: str = "characters") -> RewardFunction:
    """Return a reward function that grows with length in "characters" or "tokens" and reaches 1 at `cap`."""
    return _of_length(lambda length: min(1.0, length / cap), unit)


def near_length(ideal: int, unit: str = "characters") -> RewardFunction:
    """Return a reward function that is 1 at the ideal length and falls linearly to 0 at 0 and at twice that length."""
    return _of_length(lambda length: max(0.0, 1.0 - abs(length - ideal) / ideal), unit)


def cosine_scaled(longest: int = 1000, unit: str = "characters") -> RewardFunction:
    """Return a reward function that prefers short correct answers, and long wrong ones.

    The reward falls along a cosine from 1 to 0.5 at the length `longest` if the answer is correct, and rises from -1
    to -0.5 if not. Longer answers get the same as `longest`; in open-r1, the cosine turns back for them.
    """
    shortness = _of_length(lambda length: (1 + math.cos(math.pi * min(1.0, length / longest))) / 2, unit)

    def reward(completions: Sequence[Any], verdicts: Sequence[Any], **columns: Any) -> list[float | None]:
        sizes = [(1 + (share or 0.0)) / 2 for share in shortness(completions=completions, **columns)]
        return [size if verdict.passed else -size for size, verdict in zip(sizes, verdicts, strict=True)]

    return reward


def repetition_penalty(size: int = 3) -> RewardFunction:
    """Return TRL's reward function that falls from 0 to -1 with the fraction of repeated n-grams of `size` tokens."""
    return _of_trl("get_repetition_penalty_reward", size, -1.0)


def soft_overlong_punishment(longest: int, margin: int) -> RewardFunction:
    """Return TRL's reward function that falls linearly from 0 to -1 over the last `margin` of `longest` tokens."""
    return _of_trl("get_soft_overlong_punishment", longest, margin)


TEST_REWARDS = {"passes_tests": passes_tests, "share_of_tests_passed": share_of_tests_passed}
"""Rewards that require rows of code tasks."""

PLAIN_REWARDS: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (
        *(correct_answer, integer_answer, strict_xml_format, soft_xml_format, xml_tag_count, think_answer_format),
        *(coin_flip, *TEST_REWARDS.values()),
    )
}
"""Rewards without an argument."""

LENGTH_REWARDS: dict[str, Callable[..., RewardFunction]] = {
    function.__name__: function
    for function in (near_length, longer_is_better, cosine_scaled, repetition_penalty, soft_overlong_punishment)
}
"""Rewards with an argument."""

DEFAULT_WEIGHTS = {"correct_answer": 2.0} | dict.fromkeys(
    ("integer_answer", "strict_xml_format", "soft_xml_format", "xml_tag_count"), 0.5
)
"""Default weights. Rewards that are not listed have weight 1."""


def _has_sections(text: str, thought: str) -> bool:
    """Return whether both sections occur in order. Checks only the first occurrence of each tag, in linear time."""
    start = text.find(f"<{thought}>")
    if start < 0:
        return False
    turn = re.compile(rf"</{thought}>\s*<answer>").search(text, start)
    return turn is not None and text.find("</answer>", turn.end()) >= 0


def _of_length(rate: Callable[[int], float], unit: str) -> RewardFunction:
    """Return a reward function that applies `rate` to each completion's length. Tokens include the EOS token."""
    if unit == "characters":
        return _of_text(lambda text: rate(len(text)))

    def reward(completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any) -> list[float | None]:
        return [rate(len(ids)) for ids in completion_ids]

    return reward


def _of_trl(factory: str, *arguments: float) -> RewardFunction:
    """Return a reward function of TRL that reads token ids. TRL is imported when it is called."""

    def reward(completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any) -> list[float | None]:
        from trl import rewards

        return getattr(rewards, factory)(*arguments)(completion_ids=completion_ids)

    return reward
