"""Check the values that a reward function returns, so that a failure is never scored as 0."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError, UserError, first_line
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
    has_warned = False

    @functools.wraps(function)
    def guarded(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        nonlocal has_warned
        batch = {"completions": completions, **columns}
        try:
            # A copy, because a reward may change its arguments, which the other rewards and the trainer use as well.
            with python_file.keeping_directory():
                copies = {
                    key: copy.deepcopy(value) if isinstance(value, list) else value for key, value in batch.items()
                }
                values = list(function(**copies))
        except (RunError, UserError):  # from the grader, which names its row and completion itself
            raise
        except (Exception, SystemExit) as error:
            place = f"{python_file.line_of(error, file)}: " if file else ""
            row = _find_failing_row(function, batch)
            where = "no row fails alone" if row is None else _describe(batch, row)
            raise RewardError(
                f"{place}reward {name!r} raised {type(error).__name__}: {first_line(error)}; {where}"
            ) from error
        if len(values) != len(completions):
            raise RewardError(
                f"reward {name!r} returned {len(values)} values; expected a list of {len(completions)} numbers, one "
                "per completion"
            )
        checked = [_check_value(value, name, batch, index) for index, value in enumerate(values)]
        outside = [value for value in checked if value is not None and not -_ROUNDING <= value <= 1 + _ROUNDING]
        if outside and not has_warned:
            has_warned = True
            print(
                f"note: reward {name!r} returned {outside[0]:g}; other rewards are from 0 to 1, so scale it, or set a "
                "weight that fits (NAME=WEIGHT)",
                file=sys.stderr,
            )
        return checked

    guarded.__name__ = guarded.__qualname__ = name
    return guarded


def _check_value(value: Any, name: str, batch: Mapping[str, Any], index: int) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str) else float(value)  # an element of a tensor or an array, too
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"reward {name!r} returned {_shorten(value)}; expected a finite number, or None for a row that cannot be "
            f"graded; {_describe(batch, index)}"
        )
    return number


def _find_failing_row(function: RewardFunction, batch: Mapping[str, Any]) -> int | None:
    """Return the index of the first row that fails on its own; None if only the whole batch fails."""
    for index in range(len(batch["completions"])):
        row = {key: value[index : index + 1] if isinstance(value, Sequence) else value for key, value in batch.items()}
        try:
            function(**row)
        except (Exception, SystemExit):  # noqa: BLE001 - the caller raises the error itself
            return index
    return None


def _describe(batch: Mapping[str, Any], index: int) -> str:
    completion = batch["completions"][index]
    with contextlib.suppress(TypeError):  # an invalid one may be why the reward failed, so it is shown unchanged
        completion = completion_text(completion)
    name = batch["id"][index] if "id" in batch else index
    return f"row {name}, completion {_shorten(completion, 200)}"


def _shorten(value: Any, characters: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= characters else text[:characters] + "…"
