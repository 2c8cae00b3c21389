"""The final statement of a text without an answer marker ("The answer is 18."), for the `robust` rule of gsm8k.py.

It must be unmistakable, because the last number in a text is often an intermediate result:

- The statement is the last sentence, outside thoughts, and has no other number, not even a spelled one.
- It states the number: "The answer is 18", "Total: 18", "The cost of the order is $18", "x = 18". Other verbs need a
  conclusion: "So Janet makes $18", "In total, there are 18 boxes".
- It must be closed by a full stop, by a line break, or by markup around the number (`**18**`, `$18$`). "The answer is
  18" at the end of a truncated text could have become 180. This is stricter than `#### 18`, which the end of the text
  closes. One gap remains: a text that is cut off within 18.5, right after the point.
- After the number, only units, words like "in total", and words of the question may follow, with no comma.
- Hedges ("about", "I think", "at least", "or"), negations, questions, conditions, comparisons, list items, steps
  ("First, ..."), calculations, and multiples ("18 thousand", "18 times") are not statements. Neither are answers of
  somebody else or to a part of the question: "Total for Monday: 18" needs a question that asks for Monday.
- A rate ("$18 per box", but not per time, "$18 per day"), a percentage, or a comparison ("18 more", but not "needs 18
  more") counts only if the question asks for one.
- Earlier sentences do not count, except "The answer is 17." and those that begin like the last: they make two answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# A sentence is longer only if it is not a plain statement.
_LONGEST_STATEMENT = 300
_SENTENCE_END = re.compile(r"\n|(?<=[.!?])[)*_\"'”’$]*\s+(?=[*_(\"'“‘]*[A-Z])")
_CLOSED = re.compile(r"[.!][)*_'’$]*$|\*\*[^*]+\*\*$|\$[^$\s]+\$$|\$\$[^$]+\$\$$|\\[)\]]$")
_LIST_ITEM = re.compile(r"(?:[-*+•]|\(?(?:[0-9]+|[a-zA-Z]|[ivxIVX]+)[.)])\s")
_EMPHASIS = re.compile(r"(?<![\w*])(\*\*|__|\*|_)(?=\S)([^*_]+)(?<=\S)\1(?!\w)")
_MARKUP = re.compile(r"^#+\s|\\[()\[\]]|(?:\bUS)?[$€£¥`]")
# Numbers up to 99 in words, as in "18 (eighteen)".
_ONES = re.findall(
    "[a-z]+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = [
    ten + one
    for ten in ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
    for one in ("", *(f"-{each}" for each in _ONES[1:10]))
]
_SPELLED = {word: str(number) for number, word in enumerate([*_ONES, *_TENS])}
_SPELLED_AGAIN = re.compile(r"(?<![0-9.,])([0-9]+) \(([a-z-]+)\)")
_STATED_NUMBER = re.compile(r"\.?[0-9][0-9.,]*(?<=[0-9])")
# The other patterns see lowercase sentences with # in place of the number.
_STATES = re.compile(
    r"(?:\b(?:is|are|was|were|(?:will|must) be|equals|totals|equal to|"
    r"(?:adds|sums|comes|amounts|turns) (?:up |out )?to(?: be)?)"
    r"(?: (?:just|only|exactly|simply|therefore|thus))*(?: an? (?:grand )?total of)?:?|(?<![!=])=) ?[-({\[ ]*#"
)
_LABELS = re.compile(r"\b(?:answer|result|solution|total)\b[^=]*: ?[-({\[ ]*#|^# (?:[a-z]+ )?is the [a-z ]*answer\b")
_VAGUE_SUBJECT = re.compile(r"(?:it|this|that|there|these|those|he|she|they|we|i|you)\b")
_CONCLUDES = re.compile(
    r"(?:so|overall|altogether|consequently|in total|in all|in conclusion|as a result|this means|that means)\b"
    r"|.*\b(?:therefore|thus|hence)\b.*#"
)
# Signs of ranges, operators, and quotations; negations; a number by a letter, as in B12 or 2F; another sentence, unless
# the stop may be that of a unit, as in 18 sq. ft; and words of calculations and comparisons, which a question may have.
_NO_STATEMENT = re.compile(
    r"[?<>≤≥≠≈~|\"“”«»;…→÷×*+@&—]|\.\.|\s-\s(?!#)|(?<![a-z])/|/(?![a-z])|/.*#|!.*#|n't\b|[a-z]-*#|#[a-z]\b|i\.e\."
    r"|(?<![a-z])-[a-z]+ =|[a-z]\([a-z]\) =|#(?:[^.]*[a-z]{4})?\)?\. |(?:to \(?[a-h]\)|question [a-h]\b)"
    r"|#.*\b(?:and|so|leaving|(?:divid|multipli|add|subtract|increas|decreas|reduc|doubl|halv)ed|minimum|maximum"
    r"|less|fewer|off|past|out of|(?:high|low|old|young|tall|short|long|heavi|light|larg|great|small|bigg|cheap|warm"
    r"|cold|slow|fast)er)\b|\b(?:answer|result|solution) (?!is|are|was|equals|must|will|turns|comes|therefore|thus|to\b"
    r"|in\b|for\b|of\b)[a-z]"
    r"|^(?:so (?:that|long as)|for|at|with|by|after|set|use|using|test|try|choose|pick|put|take|plug|plugging|solve"
    r"|substitute|substituting|consider|define|imagine|let|question|problem|hint|otherwise|in that case|in theory)\b"
)
# After the number, only units, these words and words of the question may follow.
_TAIL = re.compile(r"[a-z%¢°/'(). ]*!?[)_*' ]*")
_TAIL_WORDS = frozenset(
    re.findall(
        "[a-z]+",
        "a the of in at for on per every is are was were left remain remaining total all altogether overall final "
        "answer old long more apiece dollar cent euro pound usd percent sec s minute min hour hr h day night week "
        "month year lb oz ounce kg g gram kilogram ton km cm mm mi foot feet ft inch yd yard mile meter kilometer "
        "liter l ml gallon degree c f celsius fahrenheit mph sq square cubic unit",
    )
)
_NO_STATEMENT_WORDS = re.compile(
    r"\b(?:"
    # hedges and ranges
    r"about|approx|approximately|around|roughly|nearly|almost|near|close|circa|some|somewhere|something|estimated?|"
    r"guess|thinks?|thinking|thought|believes?|believed|maybe|perhaps|probably|possible|possibly|likely|unlikely|might|may|could|"
    r"should|seems?|appears?|apparently|usually|sometimes|hope|hopefully|hypothetically|presumably|supposedly|opinion|"
    r"pending|unsure|uncertain|unknown|unclear|doubt|"
    r"between|either|or|nor|least|most|best|worst|than|under|over|above|below|beyond|before|exceeds|range|bound|limit|"
    # negation and contrast
    r"not|cannot|no|nobody|nothing|never|none|neither|few|lacks?|without|except|excluding|unless|instead|rather|but|"
    r"however|wrong|incorrect|false|mistake|"
    # an answer to another question, or of somebody else
    r"(?:expected|naive|common|another|other|alternative|proposed|rejected|invalid|draft|old|temporary|tentative|"
    r"provisional|preliminary|his|her|their|\w+'s?) (?:answer|result|solution)|previous|previously|part|sub-?question|"
    # questions, conditions, and what is given or said
    r"what|how|who|why|which|where|when|whether|if|would|suppose|supposing|assume|assuming|given|since|because|once|"
    r"until|while|says?|said|told|tells|claims?|according|states|stated|know|known|recall|remember|note|check|checked|verify|"
    r"show|find|example|option|choice|answers|"
    # steps
    r"first|second|third|fourth|fifth|last|next|then|step|now|initial|initially|original|originally|start|starts|"
    r"starting|begins?|beginning|far|already|yet|each|subtotal|partial|intermediate|running|"
    # other numbers
    r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty|"
    r"seventy|eighty|ninety|hundreds?|thousands?|millions?|billions?|trillions?|dozens?|half|halves|quarters?|thirds|"
    r"twice|double|triple|times|plus|minus|negative|squared|cubed|(?:square|cube|root|power)s? of|factorial|lakhs?|"
    r"crores?|repeating|recurring)\b"
)
# Equations of several variables, which only lead to an answer.
_VARIABLES = re.compile(r"(?<![a-z])(?:[a-z]?[xyz]{2}|[abcmn][xyz]) ?=|\b[m-z] and [m-z]\b")
# Numbers relative to something else, and the words of a question that asks for one.
_PER_THING = r"(?!(?:second|minute|hour|day|night|week|month|year)\b)[a-z]"
_RELATIVE = (
    (
        re.compile(rf"\b(?:per|every) {_PER_THING}|#.*\bapiece\b|#(?: [a-z]+)? an? {_PER_THING}"),
        re.compile(r"\b(?:per|each|every|apiece|an?|one|average|unit|rate|speed|fast)\b"),
    ),
    (
        re.compile(r"# ?(?:%|percent|per cent)"),
        re.compile(
            r"(?<![0-9])(?<![0-9] )(?:%|percent)|\b(?:share|fraction|portion|part|probability|chance|odds|rate)"
        ),
    ),
    (
        re.compile(r"^(?!.*\b(?:needs?|must|requires?)\b).*#.*\bmore\b"),
        re.compile(r"\b(?:more|additional|extra|another|still|needs?|left|remaining|difference)\b"),
    ),
)
# What a total is for, as in "Total for Monday": the question must name it.
_PART = re.compile(r"\b(?:for|on) (?:(?:the|this|that|a|an|all|his|her|their) )*([a-z]+)(?=[^#]*#)")
_QUESTION_END = re.compile(r"(?<=[.!?])\s+")
# In a conclusion with a verb of its own: calculations, and words before a number that is not their result.
_CALCULATES = re.compile(
    r"\b(?:multipl\w+|divided?|add(?:ed|s)?|subtract(?:ed|s)?|use|to)\b|(?:(?<!\btotal )(?<!\bprofit )\bof|'s|\b(?:a|"
    r"the|by|from|with|at|in|on|for|as|after|before|within|per|every|all|both|another|other|remaining|these|those|his|her|"
    r"its|their|my|our|your|number|day|week|month|year|page|chapter|room|row|place|question|problem))[-({\[ ]*#"
)


def find_statements(text: str, row: Mapping[str, Any]) -> list[str]:
    """Return the final statement of a text without markers, after other answers that it states; [] if there is none.

    Each has exactly one number. The text has ASCII digits and signs, and the row is one of gsm8k.py.
    """
    text = text.rpartition("</reasoning>")[2].rpartition("</think>")[2]
    lines, ends_line = text.strip(), text.rstrip(" \t\r").endswith("\n")
    if "<think>" in text or "<reasoning>" in text or _LIST_ITEM.match(lines, lines.rfind("\n") + 1):
        return []
    question = row.get("question", "").lower()
    asked = " ".join(each for each in _QUESTION_END.split(question) if each.endswith("?")) or question
    asked += " percent" if "%" in row["answer"].rpartition("####")[2] else ""
    known = _TAIL_WORDS.union(*map(_forms, re.findall("[a-z]{2,}", question)))
    *earlier, last = (each if len(each) <= _LONGEST_STATEMENT else "" for each in _SENTENCE_END.split(lines))
    statement = _statement(last, asked, known) if ends_line or _CLOSED.search(last) else None
    if statement is None:
        return []
    subject = re.split(r"[0-9]", last, maxsplit=1)[0]
    others = (
        _statement(each, asked, known) for each in earlier if "answer" in each.lower() or each.startswith(subject)
    )
    return [*filter(None, others), statement]


def _statement(sentence: str, asked: str, known: frozenset[str]) -> str | None:
    """Return a sentence without markup if it states the only number that it has, and of a kind that is asked for.

    Only `known` words may follow the number.
    """
    text = " ".join(_MARKUP.sub(" ", _EMPHASIS.sub(r" \2 ", sentence)).replace("’", "'").split())
    once = _SPELLED_AGAIN.sub(lambda again: again[1 if _SPELLED.get(again[2]) == again[1] else 0], text.lower())
    wording, count = _STATED_NUMBER.subn("#", once)
    if count != 1 or any(each.search(wording) for each in (_NO_STATEMENT, _NO_STATEMENT_WORDS, _VARIABLES)):
        return None
    tail = wording.partition("#")[2]
    if not _TAIL.fullmatch(tail) or any(known.isdisjoint(_forms(word)) for word in re.findall("[a-z]+", tail)):
        return None
    if any(relative.search(wording) and not asks.search(asked) for relative, asks in _RELATIVE):
        return None
    if any(word not in asked for word in _PART.findall(wording)):
        return None
    concludes = _CONCLUDES.match(wording) is not None
    if _STATES.search(wording):
        states = concludes or not _VAGUE_SUBJECT.match(wording)
    else:
        is_result = wording.count(" ") > 2 and not _CALCULATES.search(wording)
        states = (concludes and is_result) or _LABELS.search(wording) is not None
    return text if states else None


def _forms(word: str) -> set[str]:
    """Return a word as it is, and as a plural without its ending."""
    return {word, word.removesuffix("s"), re.sub("(?<=[sxzh])es$", "", word)}
