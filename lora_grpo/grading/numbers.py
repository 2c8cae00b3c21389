"""Grade answers that are one number, as in GSM8K.

Three rules grade a completion. They are reported together because a single rule is misleading: a correct answer in the
wrong format fails a strict rule, and a lucky last number passes a loose one. They read what follows the model's
thoughts (`thoughts.answer_of`; the style `think` has its thoughts in the format), and a thought that is not closed has
no answer.

- `strict`: the completion follows the row's `prompt_style`, and its answer is a bare number with the correct value.
- `flexible`: flexible-extract of lm-evaluation-harness. The last number in the text is equal as a string.
- `robust`: the last answer marker (`answer_markers.py`) has exactly one number (`number_parsing.py`), with the correct
  value. Without a marker, the final statement counts (`final_statements.py`). This rule sets `Verdict.passed`, and
  `Verdict.read_from` says which of the two it read: `marker` or `statement`.

Source: the `#### N` format is from https://github.com/openai/grade-school-math (`dataset.py`). `flexible` follows
https://github.com/EleutherAI/lm-evaluation-harness (`lm_eval/tasks/gsm8k/gsm8k.yaml`, version 3).
"""

import re
from collections.abc import Mapping
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.grading.answer_markers import find_answers
from lora_grpo.grading.final_statements import find_statements
from lora_grpo.grading.number_parsing import is_number, numbers_in, value_of, without_formatting
from lora_grpo.grading.verdict import Verdict
from lora_grpo.prompts import DEFAULT_STYLE, read_completion, thoughts, write_completion

GRADING = "the number after the last ####, \\boxed{} or <answer>, or in a final statement, by value (`robust`)"
"""How a completion passes, in one phrase."""

# lm-eval's `regex_pattern` of flexible-extract.
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
# Annotations of GSM8K's solutions, such as `<<48/2=24>>`.
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def check(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade a completion with the three rules of this module, in linear time."""
    gold_text = gold_number(row)
    answer = thoughts.answer_of(completion)
    if answer is None:
        no_rule = {"strict": False, "flexible": False, "robust": False}
        return Verdict(False, thoughts.UNFINISHED, rules=no_rule)

    rules = {
        "strict": _passes_strict(completion, row, gold_text),
        "flexible": _passes_flexible(answer, gold_text),
        "robust": False,
    }

    # The robust rule: where does the completion say its answer?
    read_from = "marker"
    contents = find_answers(answer)
    if contents is None:
        return Verdict(False, "unclosed_answer", rules=rules)
    if not contents:
        read_from = "statement"
        contents = find_statements(without_formatting(answer), row)
    if not contents:
        return Verdict(False, "no_answer" if completion.strip() else "empty", rules=rules)

    # Does each place have one number, and all the same?
    numbers_by_place = [numbers_in(content) for content in contents]
    if any(len(numbers) > 1 for numbers in numbers_by_place):
        return Verdict(False, "conflicting_answers", rules=rules)
    if not all(numbers and is_number(numbers[0]) for numbers in numbers_by_place):
        return Verdict(False, "unreadable_answer", rules=rules)
    values = [value_of(numbers[0]) for numbers in numbers_by_place]
    if len(set(values)) > 1:
        return Verdict(False, "conflicting_answers", rules=rules)

    # Is it the right one?
    is_correct = values[0] == value_of(gold_text)
    rules["robust"] = is_correct
    extracted = numbers_by_place[-1][0]
    reason = "correct" if is_correct else "wrong_answer"
    return Verdict(is_correct, reason, extracted, rules, read_from=read_from)


def _passes_strict(completion: str, row: Mapping[str, Any], gold_text: str) -> bool:
    sections = read_completion(completion, row.get("prompt_style") or DEFAULT_STYLE)
    if sections is None:
        return False
    _, answer = sections
    return is_number(answer) and value_of(answer) == value_of(gold_text)


def _passes_flexible(answer: str, gold_text: str) -> bool:
    numbers = [match.group() for match in _FLEXIBLE.finditer(answer)]
    return bool(numbers) and _normalize(numbers[-1]) == _normalize(gold_text)


def _normalize(number: str) -> str:
    """Remove the patterns in lm-eval's `regexes_to_ignore`, except `.*#### `, which cannot occur in a number."""
    return number.replace(",", "").replace("$", "").removesuffix(".")


def gold(row: Mapping[str, Any]) -> str:
    """Return the row's solution in its `prompt_style`, without the dataset's `<<48/2=24>>` calculator annotations."""
    number = gold_number(row)
    solution, marker, _ = row["answer"].rpartition("####")
    reasoning = f"The answer is {number}."
    if marker:
        reasoning = _CALCULATOR.sub("", solution).strip()
    return write_completion(reasoning, number, row.get("prompt_style") or DEFAULT_STYLE)


def gold_number(row: Mapping[str, Any], where: str | None = None) -> str:
    """Return the number in the row's answer, e.g. "109,200,000".

    Args:
        where: the place of the row, for the error; by default, its id.

    Raises:
        UserError: the answer does not have exactly one number.
    """
    answer = row["answer"].rpartition("####")[2].strip()
    numbers = numbers_in(answer)
    if len(numbers) != 1 or not is_number(numbers[0]):
        where = where or f"row {row.get('id', '?')}"
        raise UserError(
            f"{where}: no readable number in answer {answer[-60:]!r}; expected 18, or '... #### 18'; for answers that "
            "are no numbers, write a task file (docs/your-task.md)"
        )
    return numbers[0]
