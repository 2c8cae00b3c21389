"""Check the values that a reward function returns, so that a failure is never scored as 0."""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError, first_line
from lora_grpo.files import python_file
from lora_grpo.rewards.functions import RewardFunction, completion_text

_ROUNDING = 1e-6


class RewardError(RunError):
    """A reward function raised an exception or returned an invalid value. The run stops."""


def guard(function: RewardFunction, name: str, file: Path | None = None) -> RewardFunction:
    """Wrap a reward function so that it raises RewardError if the reward fails or returns an invalid value.

    A bool becomes 1 or 0, and a one-element tensor becomes its number. None means that the row cannot be graded. The
    first value outside 0 to 1 is printed. An error names the line of `file`, the user's file that defines the reward.
    """
    outside: list[float] = []

    @functools.wraps(function)
    def guarded(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        batch = {"completions": completions, **columns}
        size = len(completions)
        try:
            # A copy, because a reward may change its arguments, which the other rewards and the trainer use as well.
            with python_file.keeping_directory():
                output = function(**{key: copy.deepcopy(v) if isinstance(v, list) else v for key, v in batch.items()})
            is_list = isinstance(output, Iterable) and not isinstance(output, (str, bytes, dict))
            values = list(output) if is_list else None
        except (Exception, SystemExit) as error:
            if isinstance(error, RunError) and file is None:  # a task's `check` names its row and completion itself
                raise
            row = _find_failing_row(function, batch, size)
            place = f"{python_file.line_of(error, file)}: " if file else ""
            raise RewardError(
                f"{place}reward {name!r} raised {type(error).__name__}: {first_line(error)}; {_describe(batch, row)}"
            ) from error
        if values is None or len(values) != size:
            returned = _shorten(output) if values is None else f"{len(values)} values"
            raise RewardError(
                f"reward {name!r} returned {returned}; expected a list of {size} numbers, one per completion; "
                f"{_describe(batch, 0)}"
            )
        checked = [_check_value(value, name, batch, i) for i, value in enumerate(values)]
        found = [value for value in checked if value is not None and not -_ROUNDING <= value <= 1 + _ROUNDING]
        if found and not outside:
            outside.append(found[0])
            print(
                f"note: reward {name!r} returned {found[0]:g}; other rewards are from 0 to 1, so scale it, or set a "
                "weight that fits (NAME=WEIGHT)",
                file=sys.stderr,
            )
        return checked

    guarded.__name__ = guarded.__qualname__ = name
    return guarded


def _check_value(value: Any, name: str, batch: Mapping[str, Any], i: int) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # An element of a tensor or an array.
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"reward {name!r} returned {_shorten(value)}; expected a finite number, or None for a row that cannot be "
            f"graded; {_describe(batch, i)}"
        )
    return number


def _find_failing_row(function: RewardFunction, batch: Mapping[str, Any], size: int) -> int | None:
    """Return the index of the first row that fails on its own; None if only the whole batch fails."""
    for i in range(size):
        row = {
            key: [value[i]] if isinstance(value, list) and len(value) == size else value for key, value in batch.items()
        }
        try:
            function(**row)
        except (Exception, SystemExit):  # noqa: BLE001 - the caller raises the error itself
            return i
    return None


def _describe(batch: Mapping[str, Any], i: int | None) -> str:
    if i is None:
        return f"in a batch of {len(batch['completions'])}, but for no row alone; columns: {', '.join(sorted(batch))}"
    row = {key: value[i] for key, value in batch.items() if isinstance(value, list) and i < len(value)}
    question = _shorten(_readable(row.get("question") or row.get("prompts")))
    return f"row {row.get('id') or i}, question {question}, completion {_shorten(_readable(row['completions']), 200)}"


def _readable(completion: Any) -> Any:
    """Return the text of a completion or prompt. An invalid one may be why the reward failed, so it is unchanged."""
    try:
        return completion_text(completion)
    except TypeError:
        return completion


def _shorten(value: Any, characters: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= characters else text[:characters] + "…"
