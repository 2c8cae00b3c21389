"""Find the final statement of a completion without answer markers: "The answer is 18."

Final statements must be unmistakable, because the last number in a text is often an intermediate result
(docs/decisions/0024-final-statements.md):

- The statement is the last sentence, outside `<reasoning>`, and has no other number, operator or hedge ("about", "or").
- It states the number: "The answer is 18", "Total: 18", "x = 18", or with a conclusion, "So Janet makes $18".
- It must be closed by a full stop, a line break, or markup around the number (`**18**`), because "The answer is 18" at
  the end of a truncated text could have become 180.
- After the number, only units, words like "in total", and words of the question may follow, such as "per box".
- Earlier sentences do not count, except "The answer is 17.", which makes two answers.
"""

import re
from collections.abc import Mapping
from typing import Any

# In characters. A sentence is longer only if it is not a plain statement.
_LONGEST_STATEMENT = 300

# The patterns up to _STATED_NUMBER see sentences as they are written.
# A line break, or a full stop before a capital letter, with markup between them.
_SENTENCE_END = re.compile(r"\n|(?<=[.!?])[)*_\"'”’$]*\s+(?=[*_(\"'“‘]*[A-Z])")
# The end of a closed sentence: a full stop, bold text, or the end of a formula.
_CLOSED = re.compile(r"[.!][)*_'’$]*$|\*\*[^*]+\*\*$|\$[^$\s]+\$$|\$\$[^$]+\$\$$|\\[)\]]$")
# Headings, brackets of formulas, signs of currency, and emphasis.
_MARKUP = re.compile(r"^#+\s|\\[()\[\]]|(?:\bUS)?[$€£¥`]|\*\*|__|(?<![\w*])[*_]|[*_](?![\w*])")
# The number of a statement.
_STATED_NUMBER = re.compile(r"\.?[0-9][0-9.,]*(?<=[0-9])")

# The other patterns see lowercase sentences with # in place of the number.
# "the answer is #", "x = #"
_STATES = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals|totals|comes to|amounts to|adds up to)"
    r"(?: (?:just|only|exactly|therefore|thus))*(?: an? total of)?:?|(?<![!=])=) ?[-({\[ ]*#"
)
# "total: #", "# apples is the final answer"
_LABELS = re.compile(r"\b(?:answer|result|solution|total)\b[^=]*: ?[-({\[ ]*#|^# (?:[a-z]+ )?is the [a-z ]*answer\b")
# A subject that may be an intermediate result: "it is #"
_VAGUE_SUBJECT = re.compile(r"(?:it|this|that|there|these|those|he|she|they|we|i|you)\b")
# "so janet makes #", "janet therefore makes #"
_CONCLUDES = re.compile(r"(?:so|overall|altogether|in total|this means)\b|.*\b(?:therefore|thus|hence)\b.*#")
# Signs of a calculation, a range, a guess, a condition, a step or a question, which are not statements.
_NO_STATEMENT = re.compile(
    r"[?<>≤≥≠≈~|\"“”«»;…→÷×*+@&]|\.\.|\s-\s(?!#)|(?<![a-z])/|n't\b|[a-z]-*#|#[a-z]\b|\b(?:about|approximately|around|"
    r"roughly|nearly|almost|between|either|or|nor|than|least|most|maybe|perhaps|probably|might|may|could|should|would|"
    r"guess|think|not|no|never|without|except|if|unless|since|because|given|suppose|assume|what|how|which|first|second|"
    r"third|next|then|step|each|half|twice|double|times|plus|minus|before|after|until|by)\b"
)
# What may follow the number: words, and punctuation at the end.
_TAIL = re.compile(r"[a-z°¢/'(). ]*!?[)_*' ]*")
# The words that may follow it, beside those of the question.
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

    Each has exactly one number. The text has ASCII digits and signs, and no thoughts.
    """
    _, _, text = text.rpartition("</reasoning>")
    if "<reasoning>" in text:  # the reasoning has not ended
        return []

    *earlier_sentences, last_sentence = _SENTENCE_END.split(text.strip())
    if len(last_sentence) > _LONGEST_STATEMENT:
        return []
    ends_line = text.rstrip(" \t\r").endswith("\n")
    if not ends_line and not _CLOSED.search(last_sentence):
        return []
    known_words = _known_words(row)
    final_statement = _statement(last_sentence, known_words)
    if final_statement is None:
        return []

    statements = []
    for sentence in earlier_sentences:
        if "answer" in sentence.lower():
            statement = _statement(sentence, known_words)
            if statement is not None:
                statements.append(statement)
    return [*statements, final_statement]


def _known_words(row: Mapping[str, Any]) -> frozenset[str]:
    """Return the words that may follow the number: units, and words of the question."""
    question = row.get("question", "").lower().replace("%", " percent ")
    words = set(_TAIL_WORDS)
    for word in re.findall("[a-z]+", question):
        words |= _forms(word)
    _, _, reference = row["answer"].rpartition("####")
    if "percent" not in question and "%" not in reference:
        words -= {"percent"}
    return frozenset(words)


def _statement(sentence: str, known_words: frozenset[str]) -> str | None:
    """Return a sentence without markup if it states the only number that it has; otherwise None."""
    if len(sentence) > _LONGEST_STATEMENT:
        return None
    text = _MARKUP.sub(" ", sentence).replace("’", "'")
    text = " ".join(text.split())
    wording, num_numbers = _STATED_NUMBER.subn("#", text.lower().replace("%", " percent"))
    if num_numbers != 1 or _NO_STATEMENT.search(wording):
        return None

    _, _, tail = wording.partition("#")
    if not _TAIL.fullmatch(tail):
        return None
    for word in re.findall("[a-z]+", tail):
        if known_words.isdisjoint(_forms(word)):
            return None
    return text if _states_number(wording) else None


def _states_number(wording: str) -> bool:
    """Return whether a sentence says that something is the number, or concludes with it."""
    concludes = _CONCLUDES.match(wording) is not None
    if _STATES.search(wording):
        return concludes or not _VAGUE_SUBJECT.match(wording)
    if _LABELS.search(wording):
        return True
    return concludes and wording.count(" ") > 2  # but not "so, 18."


def _forms(word: str) -> set[str]:
    """Return a word as it is, and as a plural without its ending."""
    return {word, word.removesuffix("s"), re.sub("(?<=[sxzh])es$", "", word)}
