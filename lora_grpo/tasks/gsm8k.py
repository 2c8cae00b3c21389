"""GSM8K: grade-school word problems with one number as the answer, or any data with a question and such an answer.

Three rules grade a completion. They are reported together because a single rule is misleading: a correct answer in the
wrong format fails a strict rule, and a lucky last number passes a loose one.

- `strict`: the completion follows the row's `prompt_style`, and its answer is a bare number with the correct value.
- `flexible`: flexible-extract of lm-evaluation-harness. The last number in the text is equal as a string.
- `robust`: the last answer marker (`#### `, `\\boxed{}`, or `<answer>`) has exactly one number, with the correct value.
  Without a marker, the final statement ("The answer is 18.") counts. This rule sets `Verdict.passed`, and
  `Verdict.read_from` says which of the two it read: `marker` or `statement`.

Numbers, in both:

- Words, units, currency signs, and percent signs around the number are ignored. A dash before it is a minus sign.
- Commas must separate groups of three digits, so `1,8` is not 18. LaTeX's `\\,` and the spaces of typesetters (thin,
  narrow, no-break) separate such groups, too. Two numbers fail, even if they are equal.
- Numbers have ASCII or full-width digits and are compared as `Decimal`: 18 = 18.00 = 018, but 17.99 and 18.0001 are
  wrong. Formulas (`\\sqrt{18}`, `2^3`), exponents, superscripts, nan, and inf are not numbers.

Markers:

- An unclosed `<answer>` or `\\boxed{` is not an answer: a truncated `<answer>18` could have become 180.
- All markers on the last marker's line count, so hedging (`#### 18 #### 19`) fails. Earlier lines do not count, so a
  model may correct itself. The end of a `<think>` or `<reasoning>` section also ends a line.

Final statements. They must be unmistakable, because the last number in a text is often an intermediate result:

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

Source: the `#### N` format is from https://github.com/openai/grade-school-math (`dataset.py`). `flexible` follows
https://github.com/EleutherAI/lm-evaluation-harness (`lm_eval/tasks/gsm8k/gsm8k.yaml`, version 3).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import json_files
from lora_grpo.tasks import sources
from lora_grpo.tasks.chat import DEFAULT_STYLE, read_completion, write_completion
from lora_grpo.tasks.registry import RESERVED_COLUMNS, Row, Verdict

HUB_DATASET = "openai/gsm8k"
COLUMNS = ("question", "answer")

_NUMBER = re.compile(r"-?(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_DIGIT_RUN = re.compile(r"[0-9.,]+")
_MARKER = re.compile(r"(?<!#)####(?!#)|\\boxed\s?\{|<answer>")
_BRACE = re.compile(r"[{}]")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_CALCULATOR = re.compile(r"<<[^<>]*>>")

# Minus signs, hyphens and full-width characters, and their ASCII equivalents.
_ASCII = str.maketrans("−–－‐‑‒﹣⁻＋．，？０１２３４５６７８９", "--------+.,?0123456789")
# Thin spaces between groups of three digits.
_THIN_SPACES = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:\\,|[\u00a0\u2009\u202f])[0-9]{3})+(?![0-9])")
_THIN_SPACE = re.compile(r"\\,|[\u00a0\u2009\u202f]")
# Square meters and the like, whose superscript is no power of the number.
_UNIT_POWER = re.compile(r"(?<![a-zA-Z])(?:[dckm]?m|in|ft|yd|mi)[²³]")
# LaTeX that does not change a number's value. Any other backslash, or a symbol in _FORMULA, makes it a formula.
_LATEX_FORMATTING = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s?\{|\\[$%,!;]|\{,\}")
_FORMULA = re.compile(r"[\\^√±π∞]")

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


def load(split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
    """Return the rows of a split; see `Task.load`. All rows of a file are used for either split.

    Each record has a `question` and an `answer`, which is a number or a worked solution that ends with `#### N`. The
    `id` is "gsm8k/test/17" or "<file stem>/17", counted from 0.
    """
    source = source or HUB_DATASET
    records = sources.read(source, split, COLUMNS, columns, "main" if source.partition("@")[0] == HUB_DATASET else None)
    prefix = json_files.stem(Path(source))
    if sources.is_on_hub(source):
        prefix = f"{'gsm8k' if source == HUB_DATASET else source}/{'train' if split == 'train' else 'test'}"
    return [_row(record, f"{prefix}/{i}", where) for i, (where, record) in enumerate(records)]


def check(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade a completion with the three rules of this module, in linear time."""
    gold_text = _gold_number(row)
    gold = _value(gold_text)
    rules = {
        "strict": _passes_strict(completion, gold, row.get("prompt_style") or DEFAULT_STYLE),
        "flexible": _passes_flexible(completion, gold_text),
        "robust": False,
    }
    contents = find_answers(completion)
    read_from = "statement" if contents == [] else "marker"
    if contents == []:
        contents = _find_statements(completion, row)
    reason, extracted = _read_answer(completion, contents)
    if extracted is not None:
        rules["robust"] = _value(extracted) == gold
        reason = "correct" if rules["robust"] else "wrong_answer"
    return Verdict(rules["robust"], reason, extracted, rules, read_from=read_from if extracted is not None else None)


def _read_answer(completion: str, contents: list[str] | None) -> tuple[str, str | None]:
    """Return the number that the `robust` rule reads, or the reason why there is none."""
    if not completion.strip():
        return "empty", None
    if contents is None:
        return "unclosed_answer", None
    if not contents:
        return "no_answer", None
    numbers = [_numbers(content) for content in contents]
    if any(len(found) > 1 for found in numbers):
        return "conflicting_answers", None
    if not all(found and _NUMBER.fullmatch(found[0]) for found in numbers):
        return "unreadable_answer", None
    if len({_value(found[0]) for found in numbers}) > 1:
        return "conflicting_answers", None
    return "", numbers[-1][0]


def gold(row: Mapping[str, Any]) -> str:
    """Return the row's solution in its `prompt_style`, without the dataset's `<<48/2=24>>` calculator annotations."""
    number = _gold_number(row)
    solution, marked, _ = row["answer"].rpartition("####")
    reasoning = _CALCULATOR.sub("", solution).strip() if marked else f"The answer is {number}."
    return write_completion(reasoning, number, row.get("prompt_style") or DEFAULT_STYLE)


def find_answers(completion: str) -> list[str] | None:
    """Return the contents of the answer markers on the last marker's line; None if a marker is not closed."""
    # The reasoning is not part of the answer's line, even if both are on the same line.
    text = completion.replace("</reasoning>", "\n").replace("</think>", "\n")
    markers = list(_MARKER.finditer(text))
    if not markers:
        return []
    line_start = text.rfind("\n", 0, markers[-1].start()) + 1
    contents: list[str] = []
    end = line_start
    for marker in markers:
        if marker.start() < end:  # On an earlier line, or nested in the previous marker.
            continue
        close = _closing(text, marker)
        if close is None:
            return None
        contents.append(text[marker.end() : close].strip())
        end = close
    return contents


def _closing(text: str, marker: re.Match[str]) -> int | None:
    """Return the index where the marker's content ends, or None if the marker is not closed."""
    start = marker.end()
    if marker.group() == "####":
        newline = text.find("\n", start)
        return len(text) if newline < 0 else newline
    if marker.group() == "<answer>":
        close = text.find("</answer>", start)
        return None if close < 0 else close
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def _find_statements(completion: str, row: Mapping[str, Any]) -> list[str]:
    """Return the final statement of a text without markers, after other answers that it states; [] if there is none.

    Each has exactly one number.
    """
    text = _plain(completion).rpartition("</reasoning>")[2].rpartition("</think>")[2]
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


def _plain(content: str) -> str:
    """Return an answer with ASCII digits and signs, with commas in place of thin spaces, and without formatting."""
    text = _UNIT_POWER.sub(" square units", content.translate(_ASCII))
    text = _THIN_SPACES.sub(lambda number: _THIN_SPACE.sub(",", number.group()), text)
    return _LATEX_FORMATTING.sub(lambda match: "," if match.group() == "{,}" else " ", text)


def _numbers(content: str) -> list[str]:
    """Return up to two signed numbers of an answer. Two numbers mean that the answer is ambiguous.

    A number may be malformed (`1,8`). A formula is returned as a single malformed number.
    """
    text = _plain(content)
    if _FORMULA.search(text) or any(not c.isascii() and unicodedata.category(c)[0] == "N" for c in text):
        return [content]
    found: list[str] = []
    for run in _DIGIT_RUN.finditer(text):
        number = run.group().lstrip(",").rstrip(".,")
        if not number:
            continue
        if found:
            return [*found, number]
        sign = "-" if text[: run.start()].rstrip(" $€£¥*_({[").endswith("-") else ""
        found.append(sign + number)
    return found


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def _passes_strict(completion: str, gold: Decimal, style: str) -> bool:
    sections = read_completion(completion, style)
    return sections is not None and bool(_NUMBER.fullmatch(sections[1])) and _value(sections[1]) == gold


def _passes_flexible(completion: str, gold: str) -> bool:
    last = None
    for last in _FLEXIBLE.finditer(completion):  # noqa: B007 - only the last one counts
        pass
    return last is not None and _normalize(last.group()) == _normalize(gold)


def _normalize(number: str) -> str:
    """Remove the patterns in lm-eval's `regexes_to_ignore`, except `.*#### `, which cannot occur in a number."""
    return number.replace(",", "").replace("$", "").removesuffix(".")


def _gold_number(row: Mapping[str, Any], where: str | None = None) -> str:
    """Return the number in the row's answer, e.g. "109,200,000". Raise UserError unless there is exactly one."""
    answer = row["answer"].rpartition("####")[2].strip()
    found = _numbers(answer)
    if len(found) != 1 or not _NUMBER.fullmatch(found[0]):
        where = where or f"row {row.get('id', '?')}"
        raise UserError(
            f"{where}: no readable number in answer {answer[-60:]!r}; "
            "expected a number, or a solution that ends in '#### 18'"
        )
    return found[0]


def _row(record: Row, row_id: str, where: str) -> Row:
    """Validate a record and add its id. The answer may be a JSON number."""
    answer = record["answer"]
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        record = {**record, "answer": str(answer)}
    sources.texts(record, COLUMNS, where)
    row = {"id": row_id} | {
        key: value for key, value in record.items() if key not in {"id", "prompt", *RESERVED_COLUMNS}
    }
    _gold_number(row, where)
    return row
