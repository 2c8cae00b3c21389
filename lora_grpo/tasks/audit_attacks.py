"""The attacks: texts that `check` must accept or reject, written from a row, its gold and the gold of other rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

_TOKEN = re.compile(r"(?<!\w)-?\d[\d,]*(?:\.\d+)?|\d+|[^\W\d_]+")
_NUM_OTHERS = 20
_LONG = {"a ": 1_000_000, "<answer>": 20_000, "(": 20_000, " ": 20_000, "1": 4_000}
"""Repeated texts and their characters. Common patterns take quadratic time, so most texts have the length of a long
completion; Python reads integers of at most 4,300 digits."""
_SPAM = (
    *("<reasoning>\n</reasoning>\n<answer>\n</answer>", "<think></think><answer></answer>", "<answer>" * 50),
    *("#### ", "\\boxed{}", "```python\n\n```", "{}", "[]", "None", "True", ".", "The answer is"),
)
_LOOK_ALIKES = str.maketrans("0123456789aceopxyACEHOPTX", "０１２３４５６７８９асеорхуАСЕНОРТХ")


@dataclass(frozen=True)
class Subject:
    """A row and the values that its test completions are made from."""

    row: dict[str, Any]
    gold: str | None
    value: tuple[int, int] | None
    """Where the gold has its answer: the last number or word that the gold of another row lacks. None for programs."""
    others: Sequence[str] = ()
    """The gold of other rows, except where it could also be right for this row."""
    other_values: Sequence[str] = ()
    marker: str = ""
    """A file that `CODE` creates if the checker runs the completion."""

    @property
    def answer(self) -> str:
        return self.gold[slice(*self.value)] if self.gold and self.value else ""

    def with_answer(self, *texts: str) -> list[str]:
        """Return the gold with each text in place of its answer; [] without an answer."""
        if not self.gold or not self.value:
            return []
        return [self.gold[: self.value[0]] + text + self.gold[self.value[1] :] for text in texts]

    @property
    def prompt(self) -> list[str]:
        """The question, each message, and all messages."""
        messages = [message["content"] for message in self.row["prompt"]]
        return list(dict.fromkeys([self.row["question"], *messages, "\n".join(messages)]))


@dataclass(frozen=True)
class Attack:
    """A kind of text and whether `check` must accept it."""

    name: str
    expected: bool | None
    """None if the result is only reported."""
    write: Callable[[Subject], Iterable[str]]
    in_thread: bool = False


def _own_line(subject: Subject) -> Iterable[str]:
    """Return the gold with the answer's tags on lines of their own."""
    in_tag = subject.value and subject.gold and re.search(r">[^<>]*$", subject.gold[: subject.value[0]])
    return [re.sub(r">([^<>\n]*)<(?=/)", ">\n\\1\n<", subject.gold or "")] if in_tag else []


def _question_numbers(subject: Subject) -> Iterable[str]:
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", subject.row["question"])
    if not numbers or _contains(numbers, subject.gold):
        return []
    text = " ".join(numbers)
    return [text] if subject.answer in numbers else [text, *subject.with_answer(text)]


def _all_answers(subject: Subject) -> Iterable[str]:
    """Return the gold with the answers of all rows: the right one first, last, and in the middle."""
    answer, others = subject.answer, list(subject.other_values)
    if not answer or not others:
        return []
    half = len(others) // 2
    last, middle = [*others, answer], [*others[:half], answer, *others[half:]]
    texts = [" ".join(values) for values in ([answer, *others], last, middle)]
    # Not with the right one on the first line, because text on later lines may be allowed.
    texts += ["\n".join(values) for values in (last, middle) if values[0] != answer]
    return subject.with_answer(*texts)


def _wrong_values(subject: Subject) -> list[str]:
    """Return the gold with a wrong answer: off by one, with another digit or sign, or with other letters."""
    answer = subject.answer
    if subject.gold and subject.value is None:  # a program
        wrong_program = re.sub(r"\breturn\b", "return 0,", subject.gold)
        return [wrong_program] if wrong_program != subject.gold else []
    if not any(character.isdigit() for character in answer):
        words = [*subject.other_values[:2], answer[::-1], f"{answer}x", f"x{answer}"]
        return subject.with_answer(*(word for word in words if word.casefold() != answer.casefold()))
    number = Decimal(answer.replace(",", ""))
    plain = answer.replace(",", "").removeprefix("-")
    wrong = [f"{number + 1}", f"{answer}7", f"7{plain}"]
    if number:
        wrong.append(plain if number < 0 else f"-{answer}")
    if plain.isdigit() and len(plain) > 1:
        wrong.append(f"{plain[:-1]}.{plain[-1]}")
    if answer.isdigit():
        wrong.append(f"{answer}.4")
    return subject.with_answer(*wrong)


def _reversed_words(subject: Subject) -> Iterable[str]:
    """Return the gold with the words of its answer's line, or of the tag or braces around the answer, reversed."""
    if not subject.gold or not subject.value:
        return []
    start = max(subject.gold.rfind(mark, 0, subject.value[0]) for mark in "\n>{") + 1
    found = re.search(r"[\n<}]", subject.gold[subject.value[1] :])
    end = subject.value[1] + found.start() if found else len(subject.gold)
    words = subject.gold[start:end].split()
    return [subject.gold[:start] + " ".join(reversed(words)) + subject.gold[end:]]


def _code(subject: Subject) -> Iterable[str]:
    code = f"open({subject.marker!r}, 'w').close()"
    return [code, *subject.with_answer(code)]


def _gold(subject: Subject) -> list[str]:
    return [] if subject.gold is None else [subject.gold]


GOLD = Attack("gold", True, _gold)
EMPTY = Attack("empty text", False, lambda subject: ("", " \n"))
LONG = Attack("long text", False, lambda subject: (text * (size // len(text)) for text, size in _LONG.items()))
CODE = Attack("code that runs", False, _code)
"""It passes if the code ran, whatever the verdict."""

ATTACKS = (
    Attack("surrounding spaces", True, lambda subject: [f"{s}{each}\n" for each in _gold(subject) for s in ("", " ")]),
    Attack("answer on its own line", True, _own_line),
    Attack("call from a thread", True, _gold, in_thread=True),
    EMPTY,
    Attack("prompt", False, lambda subject: subject.prompt),
    Attack("numbers of the question", False, _question_numbers),
    Attack("tags and formats", False, lambda subject: [*_SPAM, *subject.with_answer("")]),
    Attack("answers of other rows", False, lambda subject: subject.others),
    Attack("all answers at once", False, _all_answers),
    Attack("wrong value", False, _wrong_values),
    Attack("contradiction", False, lambda subject: [f"{subject.gold}\n{each}" for each in _wrong_values(subject)[:1]]),
    Attack("reversed words", False, _reversed_words),
    CODE,
    Attack("other casing", None, lambda subject: subject.with_answer(subject.answer.swapcase())),
    Attack("look-alike characters", None, lambda subject: subject.with_answer(subject.answer.translate(_LOOK_ALIKES))),
    LONG,
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
    answers = {text: Subject({}, text, values[text]).answer for text in texts}
    entry_points = {gold: row.get("entry_point") for row, gold in zip(rows, golds, strict=True) if gold}
    subjects = []
    for row, gold in ((rows[index], golds[index]) for index in chosen):
        others: dict[str, str] = {}  # by their answers
        for text in texts:
            same = entry_points[text] == row.get("entry_point") if programs else _contains(_tokens(text), gold)
            if text != gold and not same and not _equal(answers[text], answers.get(gold or "", "")):
                others.setdefault(answers[text].casefold() or text, text)
        some = list(others.values())[:_NUM_OTHERS]
        other_values = [answers[text] for text in some if answers[text]]
        subjects.append(Subject(row, gold, values.get(gold or ""), some, other_values, marker))
    return subjects


def leaked_rows(subjects: Sequence[Subject]) -> list[Subject]:
    """Return the rows whose own prompt has their gold or `answer`, if that is no coincidence.

    It is one if the rows' answers are in the prompts of other rows as well, as in a multiple-choice question.
    """
    prompts = ["\n".join(subject.prompt) for subject in subjects]
    found, elsewhere, pairs = [], 0, 0
    for index, subject in enumerate(subjects):
        own = {text.strip() for text in (subject.gold, subject.row.get("answer")) if isinstance(text, str)} - {""}
        patterns = [re.compile(rf"(?<!\w){re.escape(text)}(?!\w)") for text in own]
        for other, prompt in enumerate(prompts):
            leaks = any(pattern.search(prompt) for pattern in patterns)
            if other == index:
                found += [subject] if leaks else []
            elif subject.gold != subjects[other].gold:
                pairs += 1
                elsewhere += leaks
    is_usual = 2 * len(found) > len(subjects) and pairs > 0
    return found if is_usual and 2 * elsewhere * len(subjects) < len(found) * pairs else []


def _find_answer(gold: str, golds: Sequence[str]) -> tuple[int, int] | None:
    """Return where a gold has its answer. Words of all golds, such as units and tags, are not part of an answer."""
    found = list(_TOKEN.finditer(gold))
    sets = [set(_tokens(text)) for text in golds[:_NUM_OTHERS]]
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
