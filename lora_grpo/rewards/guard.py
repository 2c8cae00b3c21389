"""Guard reward functions: check what they return, and say which row, line and completion failed.

GuardedReward(function, "brief")(completions=["a", "b"], id=["t/0", "t/1"])    # two floats or None, or RewardError
"""

import asyncio
import copy
import functools
import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from lora_grpo import asynchronous
from lora_grpo.errors import RunError, first_line
from lora_grpo.files import python_file
from lora_grpo.rewards.functions import RewardFunction, completion_text


class RewardError(RunError):
    """A reward function raised an exception or returned an invalid value. The run stops."""


class GuardedReward:
    """A reward function that raises RewardError if it fails or returns an invalid value.

    A bool becomes 1 or 0, and a one-element tensor becomes its number. None means that the row cannot be graded. An
    error names the line of `file`, the user's file that defines the reward. The function may be `async`.
    """

    def __init__(self, function: RewardFunction, name: str, file: Path | None = None) -> None:
        functools.update_wrapper(self, function)
        self.__name__ = self.__qualname__ = name
        self._function = function
        self._file = file

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        [numbers] = call_together([self], {"completions": completions, **columns})
        return numbers

    def start(self, batch: Mapping[str, Any]) -> Any:
        """Call the function. Return its result, an awaitable if the function is `async`."""
        # A reward may change its arguments, which the other rewards and the trainer use as well.
        arguments = dict(batch)
        for name, value in batch.items():
            # An environment may hold what cannot be copied, such as a connection.
            if isinstance(value, list) and name != "environments":
                arguments[name] = copy.deepcopy(value)
        try:
            return self._function(**arguments)
        except (Exception, SystemExit) as error:
            raise self._failed(error, batch) from error

    def numbers(self, returned: Any, batch: Mapping[str, Any]) -> list[float | None]:
        """Return the numbers that the function returned: a finite number or None for each completion.

        Args:
            returned: the result of the function, or the exception that an `async` function raised.

        Raises:
            RewardError: the function raised an exception, or returned something else.
        """
        completions = batch["completions"]
        expected = f"expected a list of {len(completions)} numbers, one for each completion"
        try:
            if isinstance(returned, BaseException):
                raise returned
            values = _as_list(returned)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # a generator raises only here
            raise self._failed(error, batch) from error

        if values is None:
            raise RewardError(f"reward {self.__name__!r} returned {_shorten(returned)}; {expected}")
        if len(values) != len(completions):
            raise RewardError(f"reward {self.__name__!r} returned {len(values)} values; {expected}")

        numbers: list[float | None] = []
        for index, value in enumerate(values):
            if value is None:
                numbers.append(None)
                continue
            number = _as_number(value)
            if not math.isfinite(number):
                raise RewardError(
                    f"reward {self.__name__!r} returned {_shorten(value)}; expected a finite number, or None for a row "
                    f"that cannot be graded; {_describe(batch, index)}"
                )
            numbers.append(number)
        return numbers

    def _failed(self, error: BaseException, batch: Mapping[str, Any]) -> RewardError:
        message = f"reward {self.__name__!r} raised {type(error).__name__}: {first_line(error)}"
        if self._file:
            message = f"{python_file.line_of(error, self._file)}: {message}"
        index = _find_failing_row(self._function, batch)
        if index is None:
            return RewardError(f"{message}; no row fails alone")
        return RewardError(f"{message}; {_describe(batch, index)}")


def call_together(rewards: Sequence[GuardedReward], batch: Mapping[str, Any]) -> list[list[float | None]]:
    """Return the values of each reward for B completions. Functions that are `async` run at the same time, as in TRL.

    Args:
        batch: `completions` and the other arguments of rewards.

    Raises:
        RewardError: a reward failed.
    """
    with python_file.keeping_directory():
        started = [reward.start(batch) for reward in rewards]
        returned = asynchronous.finished_together(started)
        return [reward.numbers(result, batch) for reward, result in zip(rewards, returned, strict=True)]


def _as_list(returned: Any) -> list[Any] | None:
    """Return the values of the list, array, tensor or generator that a reward returned; None for anything else.

    The values of a dictionary or a text are no rewards, and those of a set have no order.
    """
    if isinstance(returned, (str, bytes, Mapping, Set)):
        return None
    try:
        values = iter(returned)
    except TypeError:  # None, a single number, an `async` generator
        return None
    return list(values)


def _as_number(value: Any) -> float:
    """Return a value as a number, also an element of a tensor or an array; NaN if it is not a number."""
    if isinstance(value, (str, bytes)):
        return math.nan
    if hasattr(value, "item") and getattr(value, "size", None) == 1:  # NumPy converts no array with a dimension
        value = value.item()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _describe(batch: Mapping[str, Any], index: int) -> str:
    row = batch["id"][index] if "id" in batch else index
    return f"row {row}, completion {_shorten(completion_text(batch['completions'][index]), 200)}"


def _find_failing_row(function: RewardFunction, batch: Mapping[str, Any]) -> int | None:
    """Return the index of the first row that fails on its own; None if only the whole batch fails."""
    for index in range(len(batch["completions"])):
        arguments = dict(batch)
        for name, value in batch.items():
            if isinstance(value, Sequence):
                arguments[name] = value[index : index + 1]
        try:
            _as_list(asynchronous.finished(function(**arguments)))
        except (Exception, SystemExit, asyncio.CancelledError):  # noqa: BLE001 - the caller raises the error itself
            return index
    return None


def _shorten(value: Any, characters: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= characters else text[:characters] + "…"
