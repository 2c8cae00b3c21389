"""Stands between the trainer and a reward function, so that nothing is scored 0 in silence."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.rewards.functions import RewardFunction, completion_text


class RewardError(RunError):
    """A reward function raised, or returned something that is no reward; the run stops, nothing is scored 0."""


def guard(function: RewardFunction, name: str) -> RewardFunction:
    """Return `function` under `name`, with every failure and every value that is no reward turned into a RewardError.

    A bool counts as 1 or 0, a one-element tensor as its number, and None means that the row cannot be graded.
    """

    @functools.wraps(function)
    def guarded(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        batch = {"completions": completions, **columns}
        size = len(completions)
        try:
            output = function(**batch)
            values = (
                list(output) if isinstance(output, Iterable) and not isinstance(output, (str, bytes, dict)) else None
            )
        except (Exception, SystemExit) as error:
            culprit = _find_culprit(function, batch, size)
            raise RewardError(f"reward {name!r} raised {one_line(error)}; {_describe(batch, culprit)}") from error
        if values is None:
            raise RewardError(
                f"reward {name!r} returned {_shown(output)}; expected a list of {size} numbers, one a completion; "
                f"{_describe(batch, 0)}"
            )
        if len(values) != size:
            raise RewardError(
                f"reward {name!r} returned {len(values)} values; expected {size}, one a completion; "
                f"{_describe(batch, 0)}"
            )
        return [_check_value(value, name, batch, i) for i, value in enumerate(values)]

    guarded.__name__ = guarded.__qualname__ = name
    return guarded


def _check_value(value: Any, name: str, batch: Mapping[str, Any], i: int) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # A tensor's or an array's element.
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"reward {name!r} returned {_shown(value)}; expected a finite number, or None for a row that cannot be "
            f"graded; {_describe(batch, i)}"
        )
    return number


def _find_culprit(function: RewardFunction, batch: Mapping[str, Any], size: int) -> int | None:
    """Return the first row for which `function` raises on its own; None where it raises only for the whole batch."""
    for i in range(size):
        row = {
            key: [value[i]] if isinstance(value, list) and len(value) == size else value for key, value in batch.items()
        }
        try:
            function(**row)
        except (Exception, SystemExit):  # noqa: BLE001 - the error itself is already on its way
            return i
    return None


def _describe(batch: Mapping[str, Any], i: int | None) -> str:
    """Say which row and which completion, on one line."""
    size = len(batch["completions"])
    if i is None:
        return f"in a batch of {size}, and for no row of it alone; columns: {', '.join(sorted(batch))}"

    def cell(key: str) -> Any:
        column = batch.get(key)
        return column[i] if isinstance(column, list) and i < len(column) else None

    parts = [f"row {cell('id') or i}"]
    question = cell("question") or cell("prompts")
    if isinstance(question, list) and question and isinstance(question[-1], dict):
        question = question[-1].get("content")
    if question:
        parts.append(f"question {_shown(question)}")
    completion = batch["completions"][i] if i < size else None
    with contextlib.suppress(TypeError):  # Else shown as it is: this may be what the reward stumbled on.
        completion = completion_text(completion)
    parts.append(f"completion {_shown(completion, 200)}")
    return ", ".join(parts)


def _shown(value: Any, characters: int = 80) -> str:
    """Return the start of a value's repr, without line breaks."""
    text = " ".join(repr(value).split()) if not isinstance(value, str) else repr(value)
    return text if len(text) <= characters else text[:characters] + "…"


def one_line(error: BaseException, characters: int = 300) -> str:
    """Return an exception's type and the start of its message, without line breaks."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:characters] if message else type(error).__name__
