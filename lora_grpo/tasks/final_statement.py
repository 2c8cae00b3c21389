"""The final statement of a text without an answer marker ("The answer is 18."), for the `robust` rule of gsm8k.py.

It must be unmistakable, because the last number in a text is often an intermediate result:

- The statement is the last sentence, outside thoughts, and has no other number, operator or hedge ("about", "or").
- It states the number: "The answer is 18", "Total: 18", "The cost of the order is $18", "x = 18". Other verbs need a
  conclusion: "So Janet makes $18", "In total, there are 18 boxes".
- It must be closed by a full stop, by a line break, or by markup around the number (`**18**`, `$18$`). "The answer is
  18" at the end of a truncated text could have become 180. This is stricter than `#### 18`, which the end of the text
  closes. One gap remains: a text that is cut off within 18.5, right after the point.
- After the number, only units, words like "in total", and words of the question may follow. "$18 per box" therefore
  counts only if the question asks for something "per" box, and "18%" only if it asks for a percentage.
- Earlier sentences do not count, except "The answer is 17.", which makes two answers.

docs/decisions/0024-final-statements.md counts the verdicts that each rule changes on real completions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# A sentence is longer only if it is not a plain statement.
_LONGEST_STATEMENT = 300
_SENTENCE_END = re.compile(r"\n|(?<=[.!?])[)*_\"'”’$]*\s+(?=[*_(\"'“‘]*[A-Z])")
_CLOSED = re.compile(r"[.!][)*_'’$]*$|\*\*[^*]+\*\*$|\$[^$\s]+\$$|\$\$[^$]+\$\$$|\\[)\]]$")
_MARKUP = re.compile(r"^#+\s|\\[()\[\]]|(?:\bUS)?[$€£¥`]|\*\*|__|(?<![\w*])[*_]|[*_](?![\w*])")
_STATED_NUMBER = re.compile(r"\.?[0-9][0-9.,]*(?<=[0-9])")
# The other patterns see lowercase sentences with # in place of the number.
_STATES = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals|totals|comes to|amounts to|adds up to)"
    r"(?: (?:just|only|exactly|therefore|thus))*(?: an? total of)?:?|(?<![!=])=) ?[-({\[ ]*#"
)
_LABELS = re.compile(r"\b(?:answer|result|solution|total)\b[^=]*: ?[-({\[ ]*#|^# (?:[a-z]+ )?is the [a-z ]*answer\b")
_VAGUE_SUBJECT = re.compile(r"(?:it|this|that|there|these|those|he|she|they|we|i|you)\b")
_CONCLUDES = re.compile(r"(?:so|overall|altogether|in total|this means)\b|.*\b(?:therefore|thus|hence)\b.*#")
# What makes a sentence a calculation, a range, a guess, a condition, a step or a question instead of a statement.
_NO_STATEMENT = re.compile(
    r"[?<>≤≥≠≈~|\"“”«»;…→÷×*+@&]|\.\.|\s-\s(?!#)|(?<![a-z])/|n't\b|[a-z]-*#|#[a-z]\b|\b(?:about|approximately|around|"
    r"roughly|nearly|almost|between|either|or|nor|than|least|most|maybe|perhaps|probably|might|may|could|should|would|"
    r"guess|think|not|no|never|without|except|if|unless|since|because|given|suppose|assume|what|how|which|first|second|"
    r"third|next|then|step|each|half|twice|double|times|plus|minus|before|after|until|by)\b"
)
# After the number, only units, these words and words of the question may follow.
_TAIL = re.compile(r"[a-z°¢/'(). ]*!?[)_*' ]*")
_TAIL_WORDS = frozenset(
    re.findall(
        "[a-z]+",
        "a the of in at for on is are was were left remain remaining total all altogether overall final answer old "
        "long dollar cent euro pound usd percent second sec s minute min hour hr h day night week month year lb oz "
        "ounce kg g gram kilogram ton km cm mm mi foot feet ft inch yd yard mile meter kilometer liter l ml gallon "
        "degree c f celsius fahrenheit mph sq square cubic unit",
    )
)


def find_statements(text: str, row: Mapping[str, Any]) -> list[str]:
    """Return the final statement of a text without markers, after other answers that it states; [] if there is none.

    Each has exactly one number. The text has ASCII digits and signs, and the row is one of gsm8k.py.
    """
    text = text.rpartition("</reasoning>")[2].rpartition("</think>")[2]
    lines, ends_line = text.strip(), text.rstrip(" \t\r").endswith("\n")
    if "<think>" in text or "<reasoning>" in text:
        return []
    asked = row.get("question", "").lower().replace("%", " percent ")
    known = _TAIL_WORDS.union(*map(_forms, re.findall("[a-z]+", asked)))
    if "percent" not in asked and "%" not in row["answer"].rpartition("####")[2]:
        known -= {"percent"}
    *earlier, last = (each if len(each) <= _LONGEST_STATEMENT else "" for each in _SENTENCE_END.split(lines))
    statement = _statement(last, known) if ends_line or _CLOSED.search(last) else None
    if statement is None:
        return []
    others = (_statement(each, known) for each in earlier if "answer" in each.lower())
    return [*filter(None, others), statement]


def _statement(sentence: str, known: frozenset[str]) -> str | None:
    """Return a sentence without markup if it states the only number that it has. Only `known` words may follow it."""
    text = " ".join(_MARKUP.sub(" ", sentence).replace("’", "'").split())
    wording, count = _STATED_NUMBER.subn("#", text.lower().replace("%", " percent"))
    tail = wording.partition("#")[2]
    if count != 1 or _NO_STATEMENT.search(wording) or not _TAIL.fullmatch(tail):
        return None
    if any(known.isdisjoint(_forms(word)) for word in re.findall("[a-z]+", tail)):
        return None
    concludes = _CONCLUDES.match(wording) is not None
    if _STATES.search(wording):
        states = concludes or not _VAGUE_SUBJECT.match(wording)
    else:
        states = (concludes and wording.count(" ") > 2) or _LABELS.search(wording) is not None
    return text if states else None


def _forms(word: str) -> set[str]:
    """Return a word as it is, and as a plural without its ending."""
    return {word, word.removesuffix("s"), re.sub("(?<=[sxzh])es$", "", word)}
