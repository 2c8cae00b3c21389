"""Built-in reward functions.

**To add a reward**, write its function here and a line in `REWARDS`, at the end of this file.

A reward function has TRL's signature `(completions, **columns) -> list[float | None]`. `completions` are strings, or
conversations that end with the answer. If the prompt contains the beginning of the answer, such as `<think>`, the
completion begins with it. `columns` are the rows' columns, with one value per completion, and the grader's `verdicts`.
None means that the row cannot be graded.

Built-in rewards are between 0 and 1, unless their docstring says otherwise, and are multiplied by their weight, as in
`--rewards correct_answer=2.0`. The logged mean is unweighted and is therefore a rate. The default weights match the
GSM8K demo.

Sources: the GSM8K demo by Will Brown, https://gist.github.com/willccbb/4676755236bb08cab5f4e54a0475d6fb, whose format
patterns never match an answer with more than one line; `trl.rewards`, TRL 1.14.2; and open-r1,
https://github.com/huggingface/open-r1 (`src/open_r1/rewards.py`).
"""

import functools
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.grading import find_answers
from lora_grpo.prompts import styles, thoughts
from lora_grpo.rewards.arithmetic import equations

RewardFunction = Callable[..., list[float | None]]

_XML_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_INTEGER = re.compile(r"-?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)")
_XML_LAYOUT = re.compile(r"<reasoning>\n.*\n</reasoning>\n<answer>\n.*\n</answer>", re.DOTALL)
_TRAILING_CHARACTERS = 125
_SHORT_THOUGHT_CHARACTERS = 20


# Decorators: a reward of one text becomes a reward function.


def completion_text(completion: Any) -> str:
    """Return the text of a completion: the string itself, or the content of the last message of a conversation."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _for_each_text(rate: Callable[[str], float]) -> RewardFunction:
    """Return a reward function that rates the whole text of each completion, with thoughts."""

    @functools.wraps(rate)
    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(rate(completion_text(completion))) for completion in completions]

    return reward


def _for_each_answer(rate: Callable[[str], float]) -> RewardFunction:
    """Return a reward function that rates the text after the model's thoughts; 0 if a thought is not closed."""

    @functools.wraps(rate)
    def rate_answer(text: str) -> float:
        answer = thoughts.answer_of(text)
        return 0.0 if answer is None else rate(answer.strip())

    return _for_each_text(rate_answer)


def _for_each_length(rate: Callable[[int], float], unit: str) -> RewardFunction:
    """Return a reward function that applies `rate` to each completion's length.

    Args:
        unit: "characters" or "tokens". Tokens include the EOS token.
    """

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [rate(length) for length in _lengths(completions, columns, unit)]

    return reward


def _lengths(completions: Sequence[Any], columns: Mapping[str, Any], unit: str) -> list[int]:
    if unit == "characters":
        return [len(completion_text(completion)) for completion in completions]
    return [len(token_ids) for token_ids in columns["completion_ids"]]


# Correctness


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
        if num_tests == 0:
            rewards.append(float(verdict.passed))
            continue
        if not verdict.passed:
            passed_tests = min(passed_tests, num_tests - 1)
        rewards.append(min(passed_tests, num_tests) / num_tests)
    return rewards


# Reasoning


@_for_each_text
def right_equations(text: str) -> float:
    """Reward the fraction of different equations of numbers, such as `3 * 4 = 12`, that hold; 0 if there are none.

    It needs no reference: a wrong calculation costs reward although the right answer is unknown. Use it beside
    `correct_answer`, because alone it rewards equations that are right and trivial.
    """
    holds = dict(equations(text))
    return sum(holds.values()) / len(holds) if holds else 0.0


# Formats


@_for_each_answer
def integer_answer(text: str) -> float:
    """Reward 1 if the last answer marker (`<answer>`, `\\boxed{}`, or `#### `) contains only an integer."""
    answers = find_answers(text)
    if not answers:
        return 0.0
    return float(_INTEGER.fullmatch(answers[-1]) is not None)


@_for_each_answer
def strict_xml_format(text: str) -> float:
    """Reward 1 for the exact layout in the system prompt of the xml style.

    Each tag must occur once, on its own line. No other text is allowed, except the model's thoughts before it.
    """
    # `read_completion` checks that each tag occurs exactly once, which also makes the pattern run in linear time.
    return styles.read_completion(text, "xml") is not None and bool(_XML_LAYOUT.fullmatch(text))


@_for_each_answer
def soft_xml_format(text: str) -> float:
    """Reward 1 for a reasoning section followed by an answer section. Line breaks and other text are allowed."""
    return _has_sections(text, "reasoning")


@_for_each_answer
def xml_tag_count(text: str) -> float:
    """Reward 0.25 for each of the four tags that occurs exactly once.

    Text after `</answer>` reduces the value of that tag, to 0 at 125 characters. In the GSM8K demo, the cost of such
    text has no limit.
    """
    tags_that_occur_once = [tag for tag in _XML_TAGS if text.count(tag) == 1]
    quarters = float(len(tags_that_occur_once))
    if text.count("</answer>") == 1:
        _, _, trailing_text = text.partition("</answer>")
        quarters -= min(1.0, len(trailing_text.strip()) / _TRAILING_CHARACTERS)
    return quarters / len(_XML_TAGS)


@_for_each_text
def think_answer_format(text: str) -> float:
    """Reward the format `<think>...</think><answer>...</answer>` with 1, 0.5, or 0.

    The reward is 1 if there is no other text, the thinking has more than 20 characters, and the answer is not empty. It
    is 0.5 if both sections occur in this order, and otherwise 0.
    """
    sections = styles.read_completion(text, "think")
    if sections and len(sections.reasoning) > _SHORT_THOUGHT_CHARACTERS and sections.answer:
        return 1.0
    return 0.5 if _has_sections(text, "think") else 0.0


def _has_sections(text: str, reasoning_tag: str) -> bool:
    """Return whether both sections occur in order. Checks only the first occurrence of each tag, in linear time."""
    reasoning_start = text.find(f"<{reasoning_tag}>")
    if reasoning_start < 0:
        return False
    turn = re.compile(rf"</{reasoning_tag}>\s*<answer>").search(text, reasoning_start)
    return turn is not None and text.find("</answer>", turn.end()) >= 0


def matches_pattern(pattern: str) -> RewardFunction:
    """Return a reward function that returns 1 if the regular expression matches anywhere in the completion.

    The completion includes thoughts. `.` also matches line breaks. `^` and `$` match at the start and end of
    the completion, or of each line with `(?m)`.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return _for_each_text(lambda text: bool(compiled.search(text)))


# Length


def longer_is_better(cap: int = 1000, unit: str = "characters") -> RewardFunction:
    """Return a reward function that grows with length in "characters" or "tokens" and reaches 1 at `cap`."""
    return _for_each_length(lambda length: min(1.0, length / cap), unit)


def near_length(ideal: int, unit: str = "characters") -> RewardFunction:
    """Return a reward function that is 1 at the ideal length and falls linearly to 0 at 0 and at twice that length."""
    return _for_each_length(lambda length: max(0.0, 1.0 - abs(length - ideal) / ideal), unit)


def cosine_scaled(longest: int = 1000, unit: str = "characters") -> RewardFunction:
    """Return a reward function that prefers short correct answers, and long wrong ones.

    The reward falls along a cosine from 1 to 0.5 at the length `longest` if the answer is correct, and rises from -1
    to -0.5 if not. Longer answers get the same as `longest`; in open-r1, the cosine turns back for them.
    """

    def reward(completions: Sequence[Any], verdicts: Sequence[Any], **columns: Any) -> list[float | None]:
        rewards: list[float | None] = []
        for length, verdict in zip(_lengths(completions, columns, unit), verdicts, strict=True):
            progress = min(1.0, length / longest)
            shortness = (1 + math.cos(math.pi * progress)) / 2  # falls from 1 to 0
            size = (1 + shortness) / 2  # falls from 1 to 0.5
            rewards.append(size if verdict.passed else -size)
        return rewards

    return reward


def repetition_penalty(size: int = 3) -> RewardFunction:
    """Return TRL's reward function that falls from 0 to -1 with the fraction of repeated n-grams of `size` tokens."""
    return _from_trl("get_repetition_penalty_reward", size, -1.0)


def soft_overlong_punishment(longest: int, margin: int) -> RewardFunction:
    """Return TRL's reward function that falls linearly from 0 to -1 over the last `margin` of `longest` tokens."""
    return _from_trl("get_soft_overlong_punishment", longest, margin)


def _from_trl(factory: str, *arguments: float) -> RewardFunction:
    """Return a reward function of TRL that reads token ids. TRL is imported when it is called."""

    def reward(completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any) -> list[float | None]:
        from trl import rewards

        trl_function = getattr(rewards, factory)(*arguments)
        return trl_function(completion_ids=completion_ids)

    return reward


# Controls


def coin_flip(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return 1 or 0 with equal probability. Use it as a control: it has no signal, so any gain is due to chance.

    The same completion of the same row always gets the same reward.
    """
    ids = columns.get("id") or [""] * len(completions)
    rewards: list[float | None] = []
    for row_id, completion in zip(ids, completions, strict=True):
        text = f"{row_id}\0{completion_text(completion)}"
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        rewards.append(float(digest[0] % 2))
    return rewards


# The table of rewards


@dataclass(frozen=True)
class Argument:
    """The argument of a reward in `--rewards`, such as `50tokens` in `near_length:50tokens`."""

    pattern: str
    """A regular expression. Its groups are the arguments of the function; digits become an int."""
    examples: tuple[str, ...]
    """Arguments that errors suggest."""
    is_required: bool = False
    descends: bool = False
    """Whether each number must be at most the one before it."""


_NUMBER = "([1-9][0-9]{0,8})"
_LENGTH_PATTERN = f"{_NUMBER}(characters|tokens)?"
_LENGTH_EXAMPLES = ("200", "50tokens")


@dataclass(frozen=True)
class BuiltInReward:
    """A reward that `--rewards` knows by name."""

    function: Callable[..., Any]
    """The reward function, or, if it takes an argument, a function that returns one."""
    default_weight: float = 1.0
    argument: Argument | None = None
    is_correctness: bool = False
    """Whether it measures how correct an answer is, and nothing else."""
    needs_tests: bool = False
    """Whether it requires rows of code tasks."""


REWARDS: dict[str, BuiltInReward] = {
    "correct_answer": BuiltInReward(correct_answer, default_weight=2.0, is_correctness=True),
    "right_equations": BuiltInReward(right_equations, default_weight=0.5),
    "integer_answer": BuiltInReward(integer_answer, default_weight=0.5),
    "strict_xml_format": BuiltInReward(strict_xml_format, default_weight=0.5),
    "soft_xml_format": BuiltInReward(soft_xml_format, default_weight=0.5),
    "xml_tag_count": BuiltInReward(xml_tag_count, default_weight=0.5),
    "think_answer_format": BuiltInReward(think_answer_format),
    "coin_flip": BuiltInReward(coin_flip),
    "passes_tests": BuiltInReward(passes_tests, is_correctness=True, needs_tests=True),
    "share_of_tests_passed": BuiltInReward(share_of_tests_passed, is_correctness=True, needs_tests=True),
    "near_length": BuiltInReward(near_length, argument=Argument(_LENGTH_PATTERN, _LENGTH_EXAMPLES, is_required=True)),
    "longer_is_better": BuiltInReward(longer_is_better, argument=Argument(_LENGTH_PATTERN, _LENGTH_EXAMPLES)),
    "cosine_scaled": BuiltInReward(cosine_scaled, argument=Argument(_LENGTH_PATTERN, _LENGTH_EXAMPLES)),
    "repetition_penalty": BuiltInReward(repetition_penalty, argument=Argument(_NUMBER, ("3",))),
    "soft_overlong_punishment": BuiltInReward(
        soft_overlong_punishment,
        argument=Argument(f"{_NUMBER},{_NUMBER}", ("1000,200",), is_required=True, descends=True),
    ),
}
"""All rewards with a name. specs.py also reads `pattern:REGEX`, which is `matches_pattern`."""

RIGHT_REWARDS = tuple(name for name, reward in REWARDS.items() if reward.is_correctness)
"""The rewards that depend on a correct answer."""

TEST_REWARDS = tuple(name for name, reward in REWARDS.items() if reward.needs_tests)
"""The rewards that require rows of code tasks."""

_FORMAT_WORDS = re.compile(r"(?<![a-z])(?:format|pattern|tag_count|integer_answer)")
"""Words in the names of built-in rewards of the format. A user's function counts if it has one of them, too."""


def is_format_reward(name: str) -> bool:
    """Return whether a reward depends only on the format of a completion, judged by its name.

    Args:
        name: a spec or the short name of a reward. Of a user's reward, only the name of the function counts.
    """
    function_name = name.rpartition(".py:")[2]
    return _FORMAT_WORDS.search(function_name) is not None
