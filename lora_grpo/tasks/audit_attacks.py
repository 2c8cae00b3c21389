"""The attacks: texts that `check` must accept or reject, written from a row, its gold and the gold of other rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

_TOKEN = re.compile(r"(?<!\w)-?\d[\d,]*(?:\.\d+)?|\d+|[^\W\d_]+")
_MOST_OTHERS = 20
_LONG = {"a ": 1_000_000, "<answer>": 20_000, "(": 20_000, " ": 20_000, "1": 4_000}
"""Repeated texts and their characters. Common patterns take quadratic time, so most texts have the length of a long
completion; Python reads integers of at most 4,300 digits."""
_SPAM = (
    "<reasoning>\n</reasoning>\n<answer>\n</answer>",
    "<think></think><answer></answer>",
    "<answer>" * 50,
    "#### ",
    "\\boxed{}",
    "```python\n\n```",
    "{}",
    "[]",
    "None",
    "True",
    ".",
    "The answer is",
)
_LOOK_ALIKES = str.maketrans("0123456789aceopxyACEHOPTX", "０１２３４５６７８９асеорхуАСЕНОРТХ")


@dataclass(frozen=True)
class Subject:
    """A row under attack."""

    row: dict[str, Any]
    gold: str | None
    value: tuple[int, int] | None
    """Where the gold has its answer: the last number or word that the gold of another row lacks. None for programs."""
    others: tuple[str, ...] = ()
    """The gold of other rows, except where it could also be right for this row."""
    other_values: tuple[str, ...] = ()
    marker: str = ""
    """A file that `CODE` creates if the checker runs the completion."""

    @property
    def answer(self) -> str:
        return self.gold[slice(*self.value)] if self.gold and self.value else ""

    def with_answer(self, text: str) -> str:
        """Return the gold with another answer in its place."""
        assert self.gold is not None and self.value
        return self.gold[: self.value[0]] + text + self.gold[self.value[1] :]


Writer = Callable[[Subject], Iterator[str]]


def _empty(subject: Subject) -> Iterator[str]:
    yield from ("", " \n")


def _prompt(subject: Subject) -> Iterator[str]:
    messages = [message["content"] for message in subject.row["prompt"]]
    yield from dict.fromkeys([subject.row["question"], *messages, "\n".join(messages)])


def _question_numbers(subject: Subject) -> Iterator[str]:
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", subject.row["question"])
    if numbers and not _contains(numbers, subject.gold):
        yield " ".join(numbers)
        if subject.value and subject.answer not in numbers:
            yield subject.with_answer(" ".join(numbers))


def _other_answers(subject: Subject) -> Iterator[str]:
    yield from subject.others


def _all_answers(subject: Subject) -> Iterator[str]:
    others = list(subject.other_values)
    if not subject.answer or not others:
        return
    half = len(others) // 2
    for values in (
        [subject.answer, *others],
        [*others, subject.answer],
        [*others[:half], subject.answer, *others[half:]],
    ):
        yield subject.with_answer(" ".join(values))
        if values[0] != subject.answer:  # else the first line is correct, and text on later lines may be allowed
            yield subject.with_answer("\n".join(values))


def _spam(subject: Subject) -> Iterator[str]:
    yield from _SPAM
    if subject.value:
        yield subject.with_answer("")


def _wrong_values(subject: Subject) -> Iterator[str]:
    """Yield the gold with a wrong answer: off by one, with another digit or sign, or with other letters."""
    if subject.gold is None:
        return
    if subject.value is None:  # a program
        wrong = re.sub(r"\breturn\b", "return 0,", subject.gold)
        yield from [wrong] if wrong != subject.gold else []
        return
    answer = subject.answer
    if not any(character.isdigit() for character in answer):
        wrong_words = [*subject.other_values[:2], answer[::-1], f"{answer}x", f"x{answer}"]
        yield from (subject.with_answer(word) for word in wrong_words if word.casefold() != answer.casefold())
        return
    number = Decimal(answer.replace(",", ""))
    plain = answer.replace(",", "").removeprefix("-")
    wrong_numbers = [f"{number + 1}", f"{answer}7", f"7{plain}"]
    if number:
        wrong_numbers.append(plain if number < 0 else f"-{answer}")
    if plain.isdigit() and len(plain) > 1:
        wrong_numbers.append(f"{plain[:-1]}.{plain[-1]}")
    if answer.isdigit():
        wrong_numbers.append(f"{answer}.4")
    yield from map(subject.with_answer, wrong_numbers)


def _contradictions(subject: Subject) -> Iterator[str]:
    for wrong in _wrong_values(subject):
        yield f"{subject.gold}\n{wrong}"
        return


def _reversed_words(subject: Subject) -> Iterator[str]:
    """Yield the gold with the words of its answer's line, or of the tag or braces around the answer, reversed."""
    if not subject.gold or not subject.value:
        return
    start = max(subject.gold.rfind(mark, 0, subject.value[0]) for mark in "\n>{") + 1
    found = re.search(r"[\n<}]", subject.gold[subject.value[1] :])
    end = subject.value[1] + found.start() if found else len(subject.gold)
    words = subject.gold[start:end].split()
    if words != words[::-1]:
        yield subject.gold[:start] + " ".join(reversed(words)) + subject.gold[end:]


def _long(subject: Subject) -> Iterator[str]:
    yield from (unit * (characters // len(unit)) for unit, characters in _LONG.items())


def _code(subject: Subject) -> Iterator[str]:
    code = f"open({subject.marker!r}, 'w').close()"
    yield code
    if subject.value:
        yield subject.with_answer(code)


def _gold(subject: Subject) -> Iterator[str]:
    yield from [] if subject.gold is None else [subject.gold]


def _spaced(subject: Subject) -> Iterator[str]:
    yield from (f"{text}\n" for text in _gold(subject))
    yield from (f" {text} " for text in _gold(subject))


def _own_line(subject: Subject) -> Iterator[str]:
    if subject.value and subject.gold and re.search(r">[^<>]*$", subject.gold[: subject.value[0]]):
        yield re.sub(r">([^<>\n]*)<(?=/)", ">\n\\1\n<", subject.gold)


def _other_casing(subject: Subject) -> Iterator[str]:
    changed = (subject.with_answer(subject.answer.swapcase()) for _ in [0] if subject.answer)
    yield from (text for text in changed if text != subject.gold)


def _look_alikes(subject: Subject) -> Iterator[str]:
    changed = (subject.with_answer(subject.answer.translate(_LOOK_ALIKES)) for _ in [0] if subject.answer)
    yield from (text for text in changed if text != subject.gold)


@dataclass(frozen=True)
class Attack:
    """A kind of text and whether `check` must accept it."""

    name: str
    write: Writer
    expected: bool | None
    """None if the result is only reported."""
    in_thread: bool = False


GOLD = Attack("gold", _gold, True)
LONG = Attack("long text", _long, False)
EMPTY = Attack("empty text", _empty, False)
CODE = Attack("code that runs", _code, False)
"""It passes if the code ran, whatever the verdict."""

ATTACKS = (
    Attack("surrounding spaces", _spaced, True),
    Attack("answer on its own line", _own_line, True),
    Attack("call from a thread", _gold, True, in_thread=True),
    EMPTY,
    Attack("prompt", _prompt, False),
    Attack("numbers of the question", _question_numbers, False),
    Attack("tags and formats", _spam, False),
    Attack("answers of other rows", _other_answers, False),
    Attack("all answers at once", _all_answers, False),
    Attack("wrong value", _wrong_values, False),
    Attack("contradiction", _contradictions, False),
    Attack("reversed words", _reversed_words, False),
    CODE,
    LONG,
    Attack("other casing", _other_casing, None),
    Attack("look-alike characters", _look_alikes, None),
)

LEAK = "answer in the prompt"
REPEAT = "repeated calls"
NAMES = (*(attack.name for attack in ATTACKS), LEAK, REPEAT)
"""What `AUDIT_IGNORE` of a task file takes."""


def make_subjects(
    rows: Sequence[dict[str, Any]], golds: Sequence[str | None], chosen: Sequence[int], marker: str, *, programs: bool
) -> list[Subject]:
    """Return the chosen rows with everything that the attacks need."""
    texts = list(dict.fromkeys(gold for gold in golds if gold))
    values = {text: None if programs else _find_answer(text, texts) for text in texts}
    by_entry = {gold: row.get("entry_point") for row, gold in zip(rows, golds, strict=True) if gold}
    subjects = []
    for index in chosen:
        row, gold = rows[index], golds[index]
        own = Subject(row, gold, values.get(gold or ""), marker=marker)
        others: dict[str, str] = {}  # by their answers
        for text in texts:
            other = Subject(row, text, values[text])
            could_be_right = _contains(_tokens(text), gold)
            if programs:
                could_be_right = by_entry[text] == row.get("entry_point")
            key = other.answer.casefold() or text
            if text != gold and not could_be_right and key not in others and not _equal(other.answer, own.answer):
                others[key] = text
            if len(others) == _MOST_OTHERS:
                break
        found = [Subject(row, text, values[text]).answer for text in others.values()]
        subjects.append(Subject(row, gold, own.value, tuple(others.values()), tuple(filter(None, found)), marker))
    return subjects


def leaked_rows(subjects: Sequence[Subject]) -> list[Subject]:
    """Return the rows whose own prompt has their gold or `answer`, if that is no coincidence.

    It is one if the rows' answers are in the prompts of other rows as well, as in a multiple-choice question.
    """
    prompts = ["\n".join(_prompt(subject)) for subject in subjects]
    found, elsewhere, pairs = [], 0, 0
    for index, subject in enumerate(subjects):
        own = {text.strip() for text in (subject.gold, subject.row.get("answer")) if isinstance(text, str)} - {""}
        patterns = [re.compile(rf"(?<!\w){re.escape(text)}(?!\w)") for text in own]
        if any(pattern.search(prompts[index]) for pattern in patterns):
            found.append(subject)
        for other, prompt in enumerate(prompts):
            if other != index and subject.gold != subjects[other].gold:
                pairs += 1
                elsewhere += any(bool(pattern.search(prompt)) for pattern in patterns)
    is_usual = 2 * len(found) > len(subjects) and pairs > 0
    return found if is_usual and 2 * elsewhere * len(subjects) < len(found) * pairs else []


def _find_answer(gold: str, golds: Sequence[str]) -> tuple[int, int] | None:
    """Return where a gold has its answer. Words of all golds, such as units and tags, are not part of an answer."""
    found = list(_TOKEN.finditer(gold))
    sets = [set(_tokens(text)) for text in golds[:_MOST_OTHERS]]
    special = [match for match in found if not all(match.group().casefold() in tokens for tokens in sets)]
    return (special or found)[-1].span() if found else None


def _tokens(text: str) -> list[str]:
    return [token.casefold() for token in _TOKEN.findall(text)]


def _contains(tokens: Sequence[str], gold: str | None) -> bool:
    """Return whether all words and numbers of the gold are among the tokens, so that they could be right, too."""
    wanted = set(_tokens(gold or ""))
    return bool(wanted) and wanted <= set(tokens)


def _equal(first: str, second: str) -> bool:
    return bool(first) and first.replace(",", "").casefold() == second.replace(",", "").casefold()
