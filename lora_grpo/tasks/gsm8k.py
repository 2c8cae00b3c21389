"""GSM8K: grade-school word problems whose answer is one number, or any JSON-lines file of the same shape.

One completion is graded by three rules, reported side by side because a single rule misleads: a model that answers
well in the wrong format looks bad under a strict rule, and a lucky last number looks good under a loose one.

- `strict`: the completion keeps to the row's `prompt_style` and the answer is a bare, equal number.
- `flexible`: lm-evaluation-harness's flexible-extract; the last number of the text, equal as a string.
- `robust`: the last answer marker (`#### `, `\\boxed{}` or `<answer>`) holds exactly one number, equal in value.
  This is the headline rule: `Verdict.passed`.

What `robust` decides, and why:

- No marker is no answer. The prompt asks for one, and the last number of free text is often a step of the sum.
- An unclosed `<answer>` or `\\boxed{` is no answer: a truncated `<answer>18` may have been on its way to 180.
- Every marker on the last marker's line counts, so hedging (`#### 18 #### 19`) earns nothing; earlier lines do not
  count, so a model may correct itself. The end of a `<think>` or `<reasoning>` section ends a line too.
- Words, units, currency and percent signs around the number are ignored; a dash before it is a minus.
- Commas must group by three, so `1,8` is not 18. Two numbers, equal or not, are not one number.
- Numbers are ASCII or full-width digits, compared as `Decimal`: 18 = 18.00 = 018, while 17.99 and 18.0001 are wrong.
  Formulas (`\\sqrt{18}`, `2^3`), exponents, superscripts, nan and inf are not read.

Source: the `#### N` answer is OpenAI's, https://github.com/openai/grade-school-math (`dataset.py`); `flexible` follows
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
from lora_grpo.tasks.registry import Row, Verdict

HUB_DATASET = "openai/gsm8k"
_HUB_SPLITS = {"train": "train", "eval": "test"}

# Columns that the kit or TRL's reward call adds: a data set's own column of that name would collide.
_RESERVED_COLUMNS = {"id", "task", "prompt", "prompts", "prompt_style", "completion", "completions", "completion_ids"}
_RESERVED_COLUMNS |= {"trainer_state", "log_extra", "log_metric", "environments", "image", "images", "tools"}

_NUMBER = re.compile(r"-?(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_DIGIT_RUN = re.compile(r"[0-9.,]+")
_MARKER = re.compile(r"(?<!#)####(?!#)|\\boxed\s?\{|<answer>")
_BRACE = re.compile(r"[{}]")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_CALCULATOR = re.compile(r"<<[^<>]*>>")

# Minus signs and full-width characters that mean the ASCII one.
_ASCII = str.maketrans("−–－＋．，０１２３４５６７８９", "---+.,0123456789")
# LaTeX that dresses a number without changing it. Any other backslash, or one of these symbols, makes it a formula.
_LATEX_DRESS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s?\{|\\[$%,!;]|\{,\}")
_FORMULA = re.compile(r"[\\^√±π∞]")


def load(split: str, source: str | None = None, limit: int | None = None, seed: int = 0) -> list[Row]:
    """Return the rows of `split`.

    Args:
        split: "train" or "eval"; on the Hub, "eval" is the data set's "test" split. A file is read whole for either.
        source: a JSON-lines file with `question` and `answer` (a worked solution that ends in `#### N`, or a number);
            a data set's name on the Hub; or None for `openai/gsm8k` there.
        limit: keep this many rows, drawn with `seed` without replacement and kept in file order; None keeps all.
        seed: seed of that draw.

    Returns:
        Rows with `id` ("gsm8k/test/17", or "<file stem>/17", counted from 0), `question`, `answer`, and the source's
        other columns except those that the kit itself adds.

    Raises:
        UserError: the source is missing, unreadable or empty, or a row is malformed.
    """
    sources.check_request(split, limit)
    if sources.is_on_hub(source):
        name, hub_split = source or HUB_DATASET, _HUB_SPLITS[split]
        found = sources.read_hub(name, "main" if name in (HUB_DATASET, "gsm8k") else None, hub_split)
        label = f"{'gsm8k' if name == HUB_DATASET else name}/{hub_split}"
    else:
        found = list(sources.read_file(str(source), "'question' and 'answer'"))
        label = json_files.stem(Path(str(source)))
    rows = [_row(record, f"{label}/{i}", where) for i, (where, record) in enumerate(found)]
    return sources.draw(rows, limit, seed)


def grade(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade a completion by the three rules of this module.

    Takes time linear in the completion's length, whatever it holds.

    Args:
        completion: the assistant's text.
        row: has `answer`, and `prompt_style` where it is not "xml".

    Raises:
        UserError: the row's own answer holds no readable number (`load` refuses such rows).
    """
    gold_text = _gold_number(row)
    gold = _value(gold_text)
    rules = {
        "strict": _passes_strict(completion, gold, row.get("prompt_style") or DEFAULT_STYLE),
        "flexible": _passes_flexible(completion, gold_text),
        "robust": False,
    }
    if not completion.strip():
        return Verdict(False, "empty", None, rules)
    contents = find_answers(completion)
    if contents is None:
        return Verdict(False, "unclosed_answer", None, rules)
    if not contents:
        return Verdict(False, "no_answer", None, rules)
    numbers = [_numbers(content) for content in contents]
    if any(len(found) > 1 for found in numbers):
        return Verdict(False, "conflicting_answers", None, rules)
    if not all(found and _NUMBER.fullmatch(found[0]) for found in numbers):
        return Verdict(False, "unreadable_answer", None, rules)
    if len({_value(found[0]) for found in numbers}) > 1:
        return Verdict(False, "conflicting_answers", None, rules)
    extracted = numbers[-1][0]
    rules["robust"] = _value(extracted) == gold
    return Verdict(rules["robust"], "correct" if rules["robust"] else "wrong_answer", extracted, rules)


def gold_completion(row: Mapping[str, Any]) -> str:
    """Return the row's own solution in its `prompt_style`, without the data set's `<<48/2=24>>` calculator notes."""
    number = _gold_number(row)
    solution, marked, _ = row["answer"].rpartition("####")
    reasoning = _CALCULATOR.sub("", solution).strip() if marked else f"The answer is {number}."
    return write_completion(reasoning, number, row.get("prompt_style") or DEFAULT_STYLE)


def find_answers(completion: str) -> list[str] | None:
    """Return what stands in the answer markers of the line that holds the last one.

    Returns:
        The contents, stripped, first to last; an empty list where there is no marker; None where one is not closed.
    """
    # Reasoning is not part of the answer's line, even where all was written on one.
    text = completion.replace("</reasoning>", "\n").replace("</think>", "\n")
    markers = list(_MARKER.finditer(text))
    if not markers:
        return []
    line_start = text.rfind("\n", 0, markers[-1].start()) + 1
    contents: list[str] = []
    end = line_start
    for marker in markers:
        if marker.start() < end:  # On an earlier line, or inside the marker before it, whose content includes it.
            continue
        close = _closing(text, marker)
        if close is None:
            return None
        contents.append(text[marker.end() : close].strip())
        end = close
    return contents


def _closing(text: str, marker: re.Match[str]) -> int | None:
    """Return where the marker's content ends, or None where it is left open."""
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


def _numbers(content: str) -> list[str]:
    """Return up to two of the numbers in an answer, signs included; two are enough to know that it is not one.

    A number is returned as it stands, so it may be malformed (`1,8`); a formula is returned whole, as one such.
    """
    text = _LATEX_DRESS.sub(lambda dress: "," if dress.group() == "{,}" else " ", content.translate(_ASCII))
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
    """Return the value of a well-formed number."""
    return Decimal(number.replace(",", ""))


def _passes_strict(completion: str, gold: Decimal, style: str) -> bool:
    sections = read_completion(completion, style)
    return sections is not None and bool(_NUMBER.fullmatch(sections[1])) and _value(sections[1]) == gold


def _passes_flexible(completion: str, gold: str) -> bool:
    last = None
    for last in _FLEXIBLE.finditer(completion):  # noqa: B007 - only the last one counts
        pass
    return last is not None and _normalise(last.group()) == _normalise(gold)


def _normalise(number: str) -> str:
    """lm-eval's `regexes_to_ignore`, without the `.*#### ` that the regex has already left behind."""
    return number.replace(",", "").replace("$", "").removesuffix(".")


def _gold_number(row: Mapping[str, Any]) -> str:
    """Return the number of the row's own answer, e.g. "109,200,000".

    Raises:
        UserError: there is not exactly one readable number.
    """
    answer = row["answer"].rpartition("####")[2].strip()
    found = _numbers(answer)
    if len(found) != 1 or not _NUMBER.fullmatch(found[0]):
        raise UserError(
            f"row {row.get('id', '?')}: no readable number in answer {answer[-60:]!r}; "
            "expected a number, or a solution that ends in '#### 18'"
        )
    return found[0]


def _row(record: Any, row_id: str, where: str) -> Row:
    """Check one record and give it its id.

    Raises:
        UserError: it is not an object, a key is missing, empty or not text, or its answer is not a number.
    """
    answer = record.get("answer") if isinstance(record, dict) else None
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        record = {**record, "answer": str(answer)}
    sources.texts(record, ("question", "answer"), where)
    row = {"id": row_id} | {key: value for key, value in record.items() if key not in _RESERVED_COLUMNS}
    try:
        _gold_number(row)
    except UserError as error:
        raise UserError(f"{where}: {str(error).partition(': ')[2]}") from None
    return row
