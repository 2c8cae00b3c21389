"""Grade answers that are one number, as in GSM8K.

Three rules grade a completion. They are reported together because a single rule is misleading: a correct answer in the
wrong format fails a strict rule, and a lucky last number passes a loose one. They read what follows the model's
thoughts (`thoughts.answer_of`; the style `think` has its thoughts in the format), and a thought that is not closed has
no answer.

- `strict`: the completion follows the row's `prompt_style`, and its answer is a bare number with the correct value.
- `flexible`: flexible-extract of lm-evaluation-harness. The last number in the text is equal as a string.
- `robust`: the last answer marker (`#### `, `\\boxed{}`, or `<answer>`) has exactly one number, with the correct value.
  Without a marker, the final statement ("The answer is 18.") counts. This rule sets `Verdict.passed`, and
  `Verdict.read_from` says which of the two it read: `marker` or `statement`.

Numbers, in both:

- Words, units, currency signs, and percent signs around the number are ignored. A dash before it is a minus sign.
- LaTeX that does not change the value is ignored, too: `\\(18\\)`, `18\\ \\text{cm}`, `\\displaystyle 18`, `90^\\circ`.
- Commas must separate groups of three digits, so `1,8` is not 18. LaTeX's `\\,` and the spaces of typesetters (thin,
  narrow, no-break) separate such groups, too. Two numbers fail, even if they are equal.
- Numbers have ASCII or full-width digits and are compared as `Decimal`: 18 = 18.00 = 018, but 17.99 and 18.0001 are
  wrong. Formulas (`\\sqrt{18}`, `2^3`), exponents, superscripts, nan, and inf are not numbers.

Markers:

- An unclosed `<answer>` or `\\boxed{` is not an answer: a truncated `<answer>18` could have become 180.
- All markers on the last marker's line count, so hedging (`#### 18 #### 19`) fails; a model may correct itself on a
  later line. The end of a `<reasoning>` section also ends a line.

Final statements must be unmistakable, because the last number in a text is often an intermediate result
(docs/decisions/0024-final-statements.md):

- The statement is the last sentence, outside `<reasoning>`, and has no other number, operator or hedge ("about", "or").
- It states the number: "The answer is 18", "Total: 18", "x = 18", or with a conclusion, "So Janet makes $18".
- It must be closed by a full stop, a line break, or markup around the number (`**18**`), because "The answer is 18" at
  the end of a truncated text could have become 180.
- After the number, only units, words like "in total", and words of the question may follow, such as "per box".
- Earlier sentences do not count, except "The answer is 17.", which makes two answers.

Source: the `#### N` format is from https://github.com/openai/grade-school-math (`dataset.py`). `flexible` follows
https://github.com/EleutherAI/lm-evaluation-harness (`lm_eval/tasks/gsm8k/gsm8k.yaml`, version 3).
"""

import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.grading.verdict import Verdict
from lora_grpo.prompts import DEFAULT_STYLE, read_completion, thoughts, write_completion

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
_UNIT_POWER = re.compile(
    r"(?<![a-zA-Z])(?:[dckm]?m|in|ft|yd|mi)[²³]"
    r"|\\(?:text|mathrm)\s?\{\s?(?:[dckm]?m|in|ft|yd|mi)\.?\s?\}\s?\^\s?(?:[23]|\{[23]\})(?![0-9])"
)
# LaTeX that does not change a number's value: fonts, sizes, colors, spaces, signs of currency and degrees. Any other
# backslash, or a symbol in _FORMULA, makes it a formula.
_LATEX_FONTS = (
    "text|textnormal|textrm|textbf|textit|textsf|texttt|textup|textmd|emph|underline|mathrm|mathbf|mathit|mathsf|mathtt|"
    "mathnormal|boldsymbol|bm|mbox|hbox|fbox|boxed"
)
_LATEX_SWITCHES = (
    "displaystyle|textstyle|scriptstyle|bf|rm|it|normalsize|large|Large|LARGE|huge|Huge|quad|qquad|enspace|thinspace|"
    "pounds|euro|degree"
)
_LATEX_FORMATTING = re.compile(
    rf"\\(?:{_LATEX_FONTS})\s?\{{"
    rf"|\\(?:{_LATEX_SWITCHES})(?![a-zA-Z])"
    r"|\\(?:text)?color\s?\{[a-zA-Z]+\}"
    r"|\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?"  # the dot of `\left.` is an invisible bracket, not a point
    r"|\^\s?\{?\s?\\circ(?![a-zA-Z])"
    r"|\\[$%,!;:> ]"
    r"|,\\!|\{,\}"  # commas between groups of digits
)
_LATEX_COMMAS = (",\\!", "{,}")
# Brackets of inline and displayed math. Final statements need them, because they close a statement.
_LATEX_BRACKETS = re.compile(r"\\[()\[\]]")
_FORMULA = re.compile(r"[\\^√±π∞]")

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
# Signs of a calculation, a range, a guess, a condition, a step or a question, which are not statements.
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


def check(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade a completion with the three rules of this module, in linear time."""
    gold_text = gold_number(row)
    gold = _value(gold_text)
    answer = thoughts.answer_of(completion)
    if answer is None:
        return Verdict(False, thoughts.UNFINISHED, None, dict.fromkeys(("strict", "flexible", "robust"), False))
    sections = read_completion(completion, row.get("prompt_style") or DEFAULT_STYLE)
    *_, last = (None, *_FLEXIBLE.finditer(answer))
    rules = {
        "strict": sections is not None and bool(_NUMBER.fullmatch(sections[1])) and _value(sections[1]) == gold,
        "flexible": last is not None and _normalize(last.group()) == _normalize(gold_text),
        "robust": False,
    }
    contents, read_from = find_answers(answer), "marker"
    if contents == []:
        contents, read_from = find_statements(_plain(answer), row), "statement"
    numbers = [_numbers(content) for content in contents or ()]
    if contents is None:
        reason = "unclosed_answer"
    elif not contents:
        reason = "no_answer" if completion.strip() else "empty"
    elif any(len(found) > 1 for found in numbers):
        reason = "conflicting_answers"
    elif not all(found and _NUMBER.fullmatch(found[0]) for found in numbers):
        reason = "unreadable_answer"
    elif len({_value(found[0]) for found in numbers}) > 1:
        reason = "conflicting_answers"
    else:
        extracted = numbers[-1][0]
        rules["robust"] = _value(extracted) == gold
        reason = "correct" if rules["robust"] else "wrong_answer"
        return Verdict(rules["robust"], reason, extracted, rules, read_from=read_from)
    return Verdict(False, reason, None, rules)


def gold(row: Mapping[str, Any]) -> str:
    """Return the row's solution in its `prompt_style`, without the dataset's `<<48/2=24>>` calculator annotations."""
    number = gold_number(row)
    solution, marked, _ = row["answer"].rpartition("####")
    reasoning = _CALCULATOR.sub("", solution).strip() if marked else f"The answer is {number}."
    return write_completion(reasoning, number, row.get("prompt_style") or DEFAULT_STYLE)


def find_answers(answer: str) -> list[str] | None:
    """Return the contents of the answer markers on the last marker's line; None if a marker is not closed.

    Args:
        answer: a completion without the model's thoughts, see `thoughts.answer_of`.
    """
    # The reasoning is not part of the answer's line, even if both are on the same line.
    text = answer.replace("</reasoning>", "\n")
    markers = list(_MARKER.finditer(text))
    contents: list[str] = []
    end = text.rfind("\n", 0, markers[-1].start()) + 1 if markers else 0
    for marker in markers:
        start = marker.end()
        if marker.start() < end:  # On an earlier line, or nested in the previous marker.
            continue
        if marker.group() == "####":
            end = len(text) if (newline := text.find("\n", start)) < 0 else newline
        elif marker.group() == "<answer>":
            end = text.find("</answer>", start)
        else:
            end, depth = -1, 1
            for brace in _BRACE.finditer(text, start):
                depth += 1 if brace.group() == "{" else -1
                if depth == 0:
                    end = brace.start()
                    break
        if end < 0:
            return None
        contents.append(text[start:end].strip())
    return contents


def find_statements(text: str, row: Mapping[str, Any]) -> list[str]:
    """Return the final statement of a text without markers, after other answers that it states; [] if there is none.

    Each has exactly one number. The text has ASCII digits and signs, and no thoughts.
    """
    text = text.rpartition("</reasoning>")[2]
    lines, ends_line = text.strip(), text.rstrip(" \t\r").endswith("\n")
    if "<reasoning>" in text:
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


def _plain(content: str) -> str:
    """Return an answer with ASCII digits and signs, with commas in place of thin spaces, and without formatting."""
    text = _UNIT_POWER.sub(" square units", content.translate(_ASCII))
    text = _THIN_SPACES.sub(lambda number: _THIN_SPACE.sub(",", number.group()), text)
    return _LATEX_FORMATTING.sub(lambda match: "," if match.group() in _LATEX_COMMAS else " ", text)


def _numbers(content: str) -> list[str]:
    """Return up to two signed numbers of an answer. Two numbers mean that the answer is ambiguous.

    A number may be malformed (`1,8`). A formula is returned as a single malformed number.
    """
    text = _LATEX_BRACKETS.sub(" ", _plain(content))
    if _FORMULA.search(text) or any(not c.isascii() and unicodedata.category(c)[0] == "N" for c in text):
        return [content]
    found: list[str] = []
    for run in _DIGIT_RUN.finditer(text):
        number = run.group().lstrip(",").rstrip(".,")
        if not number:
            continue
        if found:
            return [*found, number]
        sign = "-" if text[: run.start()].rstrip(" $€£¥*_({[}").endswith("-") else ""
        found.append(sign + number)
    return found


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def _normalize(number: str) -> str:
    """Remove the patterns in lm-eval's `regexes_to_ignore`, except `.*#### `, which cannot occur in a number."""
    return number.replace(",", "").replace("$", "").removesuffix(".")


def gold_number(row: Mapping[str, Any], where: str | None = None) -> str:
    """Return the number in the row's answer, e.g. "109,200,000". Raise UserError unless there is exactly one."""
    answer = row["answer"].rpartition("####")[2].strip()
    found = _numbers(answer)
    if len(found) != 1 or not _NUMBER.fullmatch(found[0]):
        where = where or f"row {row.get('id', '?')}"
        raise UserError(f"{where}: no readable number in answer {answer[-60:]!r}; expected 18, or '... #### 18'")
    return found[0]
