"""Rows, and the verdict of one completion."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_grpo.errors import RunError

Row = dict[str, Any]
"""A flat, JSON-serializable dictionary with at least `id`, `question` and `answer`."""

RESULT_ENTRIES = frozenset(
    {"task_id", "sample_index", "completion", "response", "extracted", "num_tokens", "truncated"}
    | {"passed", "result", "status", "score", "read_from"}
    | {"messages", "turns", "ended_by", "tool_calls", "failed_calls", "failure"}
)
"""Entries of an evaluation's result, beside the task's rules. See `Result` in evaluation/results.py."""


class CheckError(RunError):
    """A `check` or an environment raised an exception or returned an invalid value. The run stops."""


@dataclass(frozen=True)
class Verdict:
    """The grade of one completion."""

    passed: bool
    """Whether the completion is correct according to the task's main rule."""
    reason: str
    """A short slug: `correct`, `wrong_answer`, `no_answer`, `unfinished_thought`, `empty`, ... For programs, `no_code`
    or the sandbox's status."""
    extracted: str | None = None
    """The graded answer or program, as it appears in the completion; None if there is none."""
    rules: Mapping[str, bool] = field(default_factory=dict)
    """The result of each rule of the task, such as `{"strict": False, "flexible": True, "robust": True}`."""
    detail: str | None = None
    """An additional line, such as the failed assertion."""
    score: float | None = None
    """Partial credit from 0 to 1; None if the completion is either correct or not."""
    read_from: str | None = None
    """Where the answer was found, if the task reads several places: for math, `marker` or `statement`."""
    tests: tuple[int, int] | None = None
    """The numbers of asserts that passed and of all asserts that the sandbox counts; None if no tests grade the row."""

    @property
    def value(self) -> float:
        """The score, or 1 for a completion that passes and 0 for any other."""
        return float(self.passed) if self.score is None else self.score


def as_verdict(returned: Any, threshold: float, failed: str = "wrong_answer") -> Verdict | None:
    """Return what a user's grader returned as a verdict, or None for another type or a score outside 0 to 1.

    None also for a `Verdict` whose texts are of another type, because files of results and reports could not hold
    them, or with a rule of the name of another entry of a result, which it would replace.

    Args:
        returned: True, False, a score, or a `Verdict`, which is returned as it is.
        threshold: the minimum score that passes.
        failed: the reason if it does not pass.
    """
    if isinstance(returned, Verdict):
        return returned if _is_valid(returned) else None
    if hasattr(returned, "item") and getattr(returned, "ndim", None) == 0:  # a NumPy or torch scalar
        returned = returned.item()
    if not _is_score(returned):
        return None
    if isinstance(returned, bool):
        return Verdict(returned, "correct" if returned else failed)
    passed = returned >= threshold
    return Verdict(passed, "correct" if passed else failed, score=float(returned))


def _is_valid(verdict: Verdict) -> bool:
    texts_are_valid = (
        isinstance(verdict.reason, str)
        and isinstance(verdict.extracted, str | None)
        and isinstance(verdict.detail, str | None)
    )
    rules_are_valid = isinstance(verdict.rules, Mapping) and RESULT_ENTRIES.isdisjoint(verdict.rules)
    score_is_valid = verdict.score is None or _is_score(verdict.score)
    return isinstance(verdict.passed, bool) and texts_are_valid and rules_are_valid and score_is_valid


def _is_score(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= 1
