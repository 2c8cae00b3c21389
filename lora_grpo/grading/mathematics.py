"""Grade answers that are numbers, expressions, sets or intervals, with math-verify.

The answer is read as in GSM8K: after the model's thoughts, from `<answer>`, `\\boxed{}` or `####`, on the last line
that has one. An unclosed marker is not an answer. All of the answer must be equal to the reference: math-verify reads
two values as a set. A comparison may take five seconds, in a process of its own.

Source: https://github.com/huggingface/Math-Verify, version 0.9.0
"""

from collections.abc import Mapping
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.grading.answer_markers import find_answers
from lora_grpo.grading.verdict import Verdict
from lora_grpo.prompts import DEFAULT_STYLE, thoughts, write_completion
from lora_grpo.workers import TooSlow, Worker

GRADING = "the answer in the last <answer>, \\boxed{} or ####, compared by math-verify"
"""How a completion passes, in one phrase."""
_MAX_CHARACTERS = 500
"""Characters of an answer that is graded."""
_is_equal = Worker("lora_grpo.grading.mathematics:is_equal", seconds=5.0, imports=["math_verify"])


def check(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade one completion, which may be any string, against the `answer` of its row."""
    text = thoughts.answer_of(completion)
    if text is None:
        return Verdict(False, thoughts.UNFINISHED)
    marked_answers = find_answers(text)
    if marked_answers is None:
        return Verdict(False, "unclosed_answer")
    answer = _joined(marked_answers)
    if not answer:
        return Verdict(False, "no_answer" if completion.strip() else "empty")
    if len(answer) > _MAX_CHARACTERS:
        return Verdict(False, "unreadable_answer", answer)
    try:
        passed = _is_equal(final_answer(row), answer)
    except TooSlow:
        return Verdict(False, "timeout", answer)
    except RuntimeError as error:
        return Verdict(False, "unreadable_answer", answer, detail=str(error))
    return Verdict(passed, "correct" if passed else "wrong_answer", answer)


def gold(row: Mapping[str, Any]) -> str:
    """Return the row's solution, if it has one, and its answer in its `prompt_style`."""
    style = row.get("prompt_style") or DEFAULT_STYLE
    answer = final_answer(row)
    solution = row.get("solution")
    if not solution and row["answer"] != answer:
        solution = row["answer"]
    solution = str(solution or "").strip()
    if style == "boxed" and find_answers(solution) == [answer]:
        return solution
    return write_completion(solution or f"The answer is ${answer}$.", answer, style)


def final_answer(row: Mapping[str, Any], where: str | None = None) -> str:
    """Return the answer of a row, which may be the end of a worked solution.

    Args:
        row: its `answer` is an answer in LaTeX, or a solution with a marked answer.
        where: location of the row for the error message.

    Raises:
        UserError: a marker is not closed, or marks nothing.
    """
    text = thoughts.answer_of(row["answer"])
    marked_answers = None
    if text is not None:
        marked_answers = find_answers(text)
    if marked_answers is None:  # a thought or a marker is not closed
        answer = ""
    elif marked_answers:
        answer = _joined(marked_answers)
    else:  # without a marker, the whole text is the answer
        answer = row["answer"].strip().strip("$")
    if not answer:
        where = where or f"row {row.get('id', '?')}"
        raise UserError(f"{where}: no answer in {row['answer'][-60:]!r}; expected one, or a solution with \\boxed{{}}")
    return answer


def is_equal(reference: str, answer: str) -> bool:
    """Return whether two answers in LaTeX are mathematically equal. Called in a `Worker`."""
    import logging

    import math_verify

    logging.disable()  # it warns that no time limit is set, which is that of the worker
    extraction = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
    expected = math_verify.parse(f"\\boxed{{{reference}}}", extraction, parsing_timeout=None)
    answered = math_verify.parse(f"\\boxed{{{answer}}}", extraction, parsing_timeout=None)
    return bool(math_verify.verify(expected, answered, timeout_seconds=None))


def _joined(marked_answers: list[str]) -> str:
    """Return the answers of a text as one, in which commas separate them."""
    return ", ".join(_unwrapped(answer) for answer in marked_answers)


def _unwrapped(answer: str) -> str:
    """Return an answer without the dollar signs and the box in which it may be."""
    answer = answer.strip().strip("$").strip()
    if answer.startswith("\\boxed") and answer.endswith("}"):
        boxed = find_answers(answer)
        if boxed and len(boxed) == 1:
            return boxed[0]
    return answer
