"""The attacks on a `check`: texts that it must accept or reject, made from the references of a row and of others."""

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

TOKEN = re.compile(r"(?<!\w)-?\d[\d,]*(?:\.\d+)?|\d+|[^\W\d_]+")
_NUM_OTHERS = 20
_LONG = {"a ": 1_000_000, "<answer>": 20_000, "(": 20_000, " ": 20_000, "1": 4_000}
"""Repeated texts and their characters. Common patterns take quadratic time, so most texts have the length of a long
completion; Python reads integers of at most 4,300 digits."""
_SPAM = (
    *("<reasoning>\n</reasoning>\n<answer>\n</answer>", "<think></think><answer></answer>", "<answer>" * 50),
    *("#### ", "\\boxed{}", "```python\n\n```", "{}", "[]", "None", "True", "nan", ".", "The answer is"),
)
MARKER = Path(tempfile.gettempdir()) / f"lora-grpo-audit-{os.getpid()}"
_CODE = f"open({str(MARKER)!r}, 'w').close()"
"""A program that creates the file MARKER, which shows that a grader has run it."""

GOLD = "gold"
EMPTY = "empty text"
LONG = "long text"
OTHERS = "answers of other rows"
ALL = "all answers at once"
LEAK = "answer in the prompt"
REPEAT = "repeated calls"

Message = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A row and what its attacks are made from."""

    row: dict[str, Any]
    gold: str | None
    """The reference: a completion, or the last text of a conversation."""
    value: tuple[int, int] | None
    """Position of the answer in the reference: the last number or word that the reference of another row lacks."""
    others: Sequence[str] = ()
    """References of other rows, except those that could also be correct for this row."""
    other_values: Sequence[str] = ()
    turns: Sequence[Message] = ()
    """With an environment, the messages of the model in the reference conversation."""

    @property
    def answer(self) -> str:
        return self.gold[slice(*self.value)] if self.gold and self.value else ""

    def with_answer(self, *texts: str) -> list[str]:
        """Return the reference with each text in place of its answer; [] without an answer."""
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
    """A kind of text, or a way to play a conversation, and whether it must be accepted."""

    name: str
    passes: bool
    write: Callable[[Subject], Iterable[Any]] = lambda subject: ()
    """The texts for a row, or the policies of `audit_environment`."""
    luck: bool = False
    """Whether it may be accepted on up to half of the rows."""


def _own_line(subject: Subject) -> Iterable[str]:
    """Return the reference with the answer's tags on separate lines."""
    in_tag = subject.value and subject.gold and re.search(r">[^<>]*$", subject.gold[: subject.value[0]])
    return [re.sub(r">([^<>\n]*)<(?=/)", ">\n\\1\n<", subject.gold or "")] if in_tag else []


def _all_answers(subject: Subject) -> Iterable[str]:
    """Return the reference with the answers of all rows: the correct one first, last, and in the middle."""
    answer = subject.answer
    others = list(subject.other_values)
    if not answer or not others:
        return []
    half = len(others) // 2
    first = [answer, *others]
    last = [*others, answer]
    middle = [*others[:half], answer, *others[half:]]
    texts = [" ".join(answers) for answers in (first, last, middle)]
    # Not with the correct one on the first line, because text on later lines may be allowed.
    texts += ["\n".join(answers) for answers in (last, middle) if answers[0] != answer]
    return subject.with_answer(*texts)


def _wrong_values(subject: Subject) -> list[str]:
    """Return the reference with a wrong answer: off by one, with another digit or sign, or with other letters."""
    answer = subject.answer
    if not any(character.isdigit() for character in answer):
        words = [*subject.other_values[:2], answer[::-1], f"{answer}x", f"x{answer}"]
        return subject.with_answer(*(word for word in words if word.casefold() != answer.casefold()))
    number = Decimal(answer.replace(",", ""))
    plain = answer.replace(",", "").removeprefix("-")
    wrong = [f"{number + 1}", f"{answer}7", f"7{plain}"]
    if number:
        wrong += [plain if number < 0 else f"-{answer}", "0"]
    if plain.isdigit() and len(plain) > 1:
        wrong.append(f"{plain[:-1]}.{plain[-1]}")
    if answer.isdigit():
        wrong.append(f"{answer}.4")
    return subject.with_answer(*wrong)


def _reversed_words(subject: Subject) -> Iterable[str]:
    """Return the reference with the words of its answer's line, or of the tag or braces around it, reversed."""
    if not subject.gold or not subject.value:
        return []
    start = max(subject.gold.rfind(mark, 0, subject.value[0]) for mark in "\n>{") + 1
    next_mark = re.search(r"[\n<}]", subject.gold[subject.value[1] :])
    end = subject.value[1] + next_mark.start() if next_mark else len(subject.gold)
    return [subject.gold[:start] + " ".join(reversed(subject.gold[start:end].split())) + subject.gold[end:]]


def _with_spaces(subject: Subject) -> list[str]:
    """Return the reference with white space around it."""
    return [f"{subject.gold}\n", f" {subject.gold}\n"] if subject.gold else []


def _contradiction(subject: Subject) -> list[str]:
    """Return the reference, followed by one with a wrong answer."""
    return [f"{subject.gold}\n{wrong}" for wrong in _wrong_values(subject)[:1]]


ATTACKS = (
    Attack(GOLD, True),
    Attack("surrounding spaces", True, _with_spaces),
    Attack("answer on its own line", True, _own_line),
    Attack(EMPTY, False, lambda subject: ("", " \n")),
    Attack("prompt", False, lambda subject: subject.prompt),
    Attack("tags and formats", False, lambda subject: [*_SPAM, *subject.with_answer("")]),
    Attack(OTHERS, False, lambda subject: subject.others),
    Attack(ALL, False, _all_answers),
    Attack("wrong value", False, _wrong_values),
    Attack("contradiction", False, _contradiction),
    Attack("reversed words", False, _reversed_words),
    Attack("code that runs", False, lambda subject: [_CODE, *subject.with_answer(_CODE, "98765**87654321")]),
    Attack(LONG, False, lambda subject: (text * (size // len(text)) for text, size in _LONG.items())),
)
NAMES = (*(attack.name for attack in ATTACKS[1:]), LEAK, REPEAT)
"""The allowed values of `AUDIT_IGNORE`."""


def make_subjects(rows: Sequence[dict[str, Any]], golds: Sequence[Any], chosen: Sequence[int]) -> list[Subject]:
    """Return the chosen rows with everything that the attacks need.

    Args:
        golds: the reference of each row, None without one: a text, or the messages of the model in a conversation.
    """
    references = [gold[-1]["content"] if gold and not isinstance(gold, str) else gold for gold in golds]
    distinct = list(dict.fromkeys(reference for reference in references if reference))
    spans = _answer_spans(distinct)
    answers = {text: Subject({}, text, spans[text]).answer.replace(",", "").casefold() for text in distinct}
    subjects = []
    for index in chosen:
        reference = references[index] or ""
        tokens = set(_tokens(reference))
        others = []
        for text in distinct:
            # An answer with all words and numbers of the reference could be correct.
            could_be_correct = bool(tokens) and tokens <= set(_tokens(text))
            if answers[text] != answers.get(reference) and not could_be_correct:
                others.append(text)
        others = others[:_NUM_OTHERS]
        other_values = []
        for text in others:
            span = spans[text]
            if span:
                other_values.append(text[slice(*span)])
        turns = golds[index] or ()
        subjects.append(Subject(rows[index], reference or None, spans.get(reference), others, other_values, turns))
    return subjects


def _answer_spans(references: Sequence[str]) -> dict[str, tuple[int, int] | None]:
    """Return the position of the answer in each reference, None if it has neither a word nor a number.

    Words of all references, such as units and tags, are not part of an answer.
    """
    token_sets = [set(_tokens(text)) for text in references[:_NUM_OTHERS]]
    spans: dict[str, tuple[int, int] | None] = {}
    for text in references:
        tokens = list(TOKEN.finditer(text))
        special = []
        for token in tokens:
            is_in_all = all(token.group().casefold() in token_set for token_set in token_sets)
            if not is_in_all:
                special.append(token)
        spans[text] = (special or tokens)[-1].span() if tokens else None
    return spans


def leaked_rows(subjects: Sequence[Subject]) -> list[Subject]:
    """Return the rows whose prompt contains their reference or their column `answer`.

    The list is empty if most prompts also contain answers of other rows, as in multiple-choice questions, or if only a
    minority of the rows is affected, as by a small number that occurs in both.
    """
    prompts = ["\n".join(subject.prompt) for subject in subjects]
    # A reference such as `<answer>5</answer>` is not in a prompt that contains only the answer.
    answers: list[set[str]] = []
    for subject in subjects:
        candidates = (subject.gold, subject.row.get("answer"))
        answers.append({text.strip() for text in candidates if isinstance(text, str)} - {""})

    def leaks(texts: set[str], prompt: str) -> bool:
        return any(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", prompt) for text in texts)

    # The rate of rows whose prompt has their own answer must be twice that of prompts with answers of other rows.
    leaked = []
    for subject, texts, prompt in zip(subjects, answers, prompts, strict=True):
        if leaks(texts, prompt):
            leaked.append(subject)
    pairs = 0
    leaks_elsewhere = 0
    for texts in answers:
        for other_texts, prompt in zip(answers, prompts, strict=True):
            if texts and texts != other_texts:
                pairs += 1
                leaks_elsewhere += leaks(texts, prompt)
    is_majority = 2 * len(leaked) > len(subjects)
    is_rare_elsewhere = 2 * leaks_elsewhere * len(subjects) < len(leaked) * pairs
    return leaked if is_majority and is_rare_elsewhere else []


def _tokens(text: str) -> list[str]:
    return [token.casefold() for token in TOKEN.findall(text)]
