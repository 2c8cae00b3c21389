"""The attacks on a `check`: texts that it must accept or reject, made from the references of a row and of others."""

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

TOKEN = re.compile(
    r"(?<!\w)-?\d[\d,]*(?:\.\d+)?"  # a number, with its sign, commas and decimals
    r"|\d+"  # the digits of a name, such as x2
    r"|[^\W\d_]+"  # a word
)
_MAX_OTHERS = 20
_LONG_TEXTS = {"a ": 1_000_000, "<answer>": 20_000, "(": 20_000, " ": 20_000, "1": 4_000}
"""A text that is repeated -> the number of characters to fill with it.

Common patterns take quadratic time for marks and spaces, which therefore have the length of a long completion. Python
reads integers of at most 4,300 digits.
"""
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
    "nan",
    ".",
    "The answer is",
)
MARKER = Path(tempfile.gettempdir()) / f"lora-grpo-audit-{os.getpid()}"
"""A file that exists only after a grader has run the code in a completion."""
_CODE = f"open({str(MARKER)!r}, 'w').close()"
"""A program that creates this file."""

GOLD = "gold"
EMPTY_TEXT = "empty text"
LONG_TEXT = "long text"
OTHER_ANSWERS = "answers of other rows"
ALL_ANSWERS = "all answers at once"
LEAKED_ANSWER = "answer in the prompt"
REPEATED_CALLS = "repeated calls"

Message = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A row and what its attacks are made from."""

    row: dict[str, Any]
    reference: str | None
    """A completion that must pass, or the last text of a reference conversation; None without one."""
    answer_span: slice | None
    """Where the answer is in the reference: the last number or word that the reference of another row lacks."""
    other_references: Sequence[str] = ()
    """References of other rows, except those that could also be correct for this row."""
    other_answers: Sequence[str] = ()
    """The answers in them."""
    turns: Sequence[Message] = ()
    """With an environment, the messages of the model in the reference conversation."""

    @property
    def answer(self) -> str:
        """The answer in the reference; "" without one."""
        if self.reference is None or self.answer_span is None:
            return ""
        return self.reference[self.answer_span]

    def with_answer(self, *texts: str) -> list[str]:
        """Return the reference with each text in place of its answer; [] without an answer."""
        if self.reference is None or self.answer_span is None:
            return []
        before = self.reference[: self.answer_span.start]
        after = self.reference[self.answer_span.stop :]
        return [before + text + after for text in texts]

    @property
    def prompt_texts(self) -> list[str]:
        """The question, each message, and all messages."""
        messages = [message["content"] for message in self.row["prompt"]]
        return list(dict.fromkeys([self.row["question"], *messages, "\n".join(messages)]))


@dataclass(frozen=True)
class Attack:
    """A kind of text, or a way to play a conversation, and whether the grader must accept it."""

    name: str
    must_pass: bool
    attempts: Callable[[Subject], Iterable[Any]] = lambda subject: ()
    """The texts for a row or, with an environment, the policies."""
    may_pass_by_luck: bool = False
    """Whether it is no finding if up to half of the rows accept it."""


def _own_line(subject: Subject) -> Iterable[str]:
    """Return the reference with the answer's tags on separate lines; nothing if the answer is not in a tag."""
    if subject.reference is None or subject.answer_span is None:
        return []
    before = subject.reference[: subject.answer_span.start]
    if not re.search(r">[^<>]*$", before):
        return []
    return [re.sub(r">([^<>\n]*)<(?=/)", ">\n\\1\n<", subject.reference)]


def _all_answers(subject: Subject) -> Iterable[str]:
    """Return the reference with the answers of all rows: the correct one first, last, and in the middle."""
    answer = subject.answer
    others = list(subject.other_answers)
    if not answer or not others:
        return []
    half = len(others) // 2
    first = [answer, *others]
    last = [*others, answer]
    middle = [*others[:half], answer, *others[half:]]
    texts = [" ".join(answers) for answers in (first, last, middle)]
    # One answer per line, unless the correct one is on the first line: a task may allow any text after that line.
    for answers in (last, middle):
        if answers[0] != answer:
            texts.append("\n".join(answers))
    return subject.with_answer(*texts)


def _wrong_answers(subject: Subject) -> list[str]:
    """Return the reference with a wrong answer: off by one, with another digit or sign, or with other letters."""
    answer = subject.answer
    if not re.search(r"\d", answer):  # the 2 of H₂O is no digit, as in `TOKEN`
        words = [*subject.other_answers[:2], answer[::-1], f"{answer}x", f"x{answer}"]
        return subject.with_answer(*(word for word in words if word.casefold() != answer.casefold()))
    number = Decimal(answer.replace(",", ""))
    plain = answer.replace(",", "").removeprefix("-")
    wrong = [f"{number + 1}", f"{answer}7", f"7{plain}"]
    if number < 0:
        wrong += [plain, "0"]
    elif number > 0:
        wrong += [f"-{answer}", "0"]
    if plain.isdigit() and len(plain) > 1:
        wrong.append(f"{plain[:-1]}.{plain[-1]}")
    if answer.isdigit():
        wrong.append(f"{answer}.4")
    return subject.with_answer(*wrong)


def _reversed_words(subject: Subject) -> Iterable[str]:
    """Return the reference with the words of its answer's line, or of the tag or braces around it, reversed."""
    reference = subject.reference
    if reference is None or subject.answer_span is None:
        return []
    start = max(reference.rfind(mark, 0, subject.answer_span.start) for mark in "\n>{") + 1
    end = len(reference)
    closing_mark = re.compile(r"[\n<}]").search(reference, subject.answer_span.stop)
    if closing_mark:
        end = closing_mark.start()
    words = reference[start:end].split()
    return [reference[:start] + " ".join(reversed(words)) + reference[end:]]


def _with_spaces(subject: Subject) -> list[str]:
    """Return the reference with white space around it."""
    if subject.reference is None:
        return []
    return [f"{subject.reference}\n", f" {subject.reference}\n"]


def _contradiction(subject: Subject) -> list[str]:
    """Return the reference, followed by one with a wrong answer."""
    return [f"{subject.reference}\n{wrong}" for wrong in _wrong_answers(subject)[:1]]


def _long_texts(subject: Subject) -> Iterable[str]:
    for text, size in _LONG_TEXTS.items():
        yield text * (size // len(text))


ATTACKS = (
    Attack(GOLD, True),
    Attack("surrounding spaces", True, _with_spaces),
    Attack("answer on its own line", True, _own_line),
    Attack(EMPTY_TEXT, False, lambda subject: ("", " \n")),
    Attack("prompt", False, lambda subject: subject.prompt_texts),
    Attack("tags and formats", False, lambda subject: [*_SPAM, *subject.with_answer("")]),
    Attack(OTHER_ANSWERS, False, lambda subject: subject.other_references),
    Attack(ALL_ANSWERS, False, _all_answers),
    Attack("wrong value", False, _wrong_answers),
    Attack("contradiction", False, _contradiction),
    Attack("reversed words", False, _reversed_words),
    Attack("code that runs", False, lambda subject: [_CODE, *subject.with_answer(_CODE, "98765**87654321")]),
    Attack(LONG_TEXT, False, _long_texts),
)
NAMES = (*(attack.name for attack in ATTACKS[1:]), LEAKED_ANSWER, REPEATED_CALLS)
"""The allowed values of `AUDIT_IGNORE`."""


def make_subjects(rows: Sequence[dict[str, Any]], golds: Sequence[Any], chosen: Sequence[int]) -> list[Subject]:
    """Return the chosen rows with everything that the attacks need.

    Args:
        golds: the reference of each row, None without one: a text, or the messages of the model in a conversation.
        chosen: indices of the rows.
    """
    references = [_as_text(gold) for gold in golds]
    distinct = list(dict.fromkeys(reference for reference in references if reference))
    spans = _answer_spans(distinct)
    tokens = {text: set(_tokens(text)) for text in distinct}
    answers = {}
    for text, span in spans.items():
        answers[text] = "" if span is None else text[span]

    def could_be_correct(text: str, reference: str | None) -> bool:
        """Return whether the reference of another row could be correct for the row with this reference."""
        if reference is None:
            return False
        has_same_answer = _normalized(answers[text]) == _normalized(answers[reference])
        has_all_tokens = bool(tokens[reference]) and tokens[reference] <= tokens[text]
        return has_same_answer or has_all_tokens

    subjects = []
    for index in chosen:
        reference = references[index]
        others = [text for text in distinct if not could_be_correct(text, reference)][:_MAX_OTHERS]
        subject = Subject(
            rows[index],
            reference,
            answer_span=spans[reference] if reference else None,
            other_references=others,
            other_answers=[answers[text] for text in others if answers[text]],
            turns=golds[index] or (),
        )
        subjects.append(subject)
    return subjects


def _as_text(gold: Any) -> str | None:
    """Return a reference, or the last text of a reference conversation; None if it is empty."""
    if not gold:
        return None
    text = gold if isinstance(gold, str) else gold[-1]["content"]
    return text or None


def _normalized(answer: str) -> str:
    return answer.replace(",", "").casefold()


def _answer_spans(references: Sequence[str]) -> dict[str, slice | None]:
    """Return the position of the answer in each reference, None if it has neither a word nor a number.

    The answer is the last word or number. Words of all references, such as units and tags, do not count if there is
    another one.
    """
    token_sets = [set(_tokens(text)) for text in references[:_MAX_OTHERS]]

    def is_in_all(token: re.Match[str]) -> bool:
        return all(token.group().casefold() in token_set for token_set in token_sets)

    spans: dict[str, slice | None] = {}
    for text in references:
        tokens = list(TOKEN.finditer(text))
        special = [token for token in tokens if not is_in_all(token)]
        if special:
            spans[text] = slice(*special[-1].span())
        elif tokens:
            spans[text] = slice(*tokens[-1].span())
        else:
            spans[text] = None
    return spans


def leaked_rows(subjects: Sequence[Subject]) -> list[Subject]:
    """Return the rows whose prompt contains their reference or their column `answer`.

    The list is empty if most prompts also contain answers of other rows, as in multiple-choice questions, or if only a
    minority of the rows is affected, as by a small number that occurs in both.
    """
    prompts = ["\n".join(subject.prompt_texts) for subject in subjects]
    # A reference such as `<answer>5</answer>` is not in a prompt that contains only the answer.
    answers: list[set[str]] = []
    for subject in subjects:
        candidates = (subject.reference, subject.row.get("answer"))
        answers.append({text.strip() for text in candidates if isinstance(text, str)} - {""})

    def leaks(texts: set[str], prompt: str) -> bool:
        return any(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", prompt) for text in texts)

    leaked = []
    for subject, texts, prompt in zip(subjects, answers, prompts, strict=True):
        if leaks(texts, prompt):
            leaked.append(subject)
    num_pairs = 0  # of an answer and the prompt of another row
    num_leaking_pairs = 0
    for texts in answers:
        for other_texts, prompt in zip(answers, prompts, strict=True):
            if texts and texts != other_texts:
                num_pairs += 1
                num_leaking_pairs += leaks(texts, prompt)

    is_majority = 2 * len(leaked) > len(subjects)
    # Own prompts leak at more than twice the rate of other prompts. Multiplied out, because there may be no pairs:
    # len(leaked) / len(subjects) > 2 * num_leaking_pairs / num_pairs
    is_rare_elsewhere = len(leaked) * num_pairs > 2 * num_leaking_pairs * len(subjects)
    if is_majority and is_rare_elsewhere:
        return leaked
    return []


def _tokens(text: str) -> list[str]:
    return [token.casefold() for token in TOKEN.findall(text)]
