"""Parse `--rewards`: validate each spec without heavy imports, then load its function and guard its values.

A spec is `NAME` or `NAME=WEIGHT`. The weight multiplies the value of the function, which is 0 to 1 for built-in rewards
and has any range for user-defined rewards. `functions.DEFAULT_WEIGHTS` defines the default weights. NAME is one of
`functions.PLAIN_REWARDS`, one of `functions.LENGTH_REWARDS` (`near_length:200`, `near_length:50tokens`,
`longer_is_better`, `soft_overlong_punishment:1000,200`), `pattern:REGEX` (its weight is required), or a function that a
Python file defines or imports (`my_rewards.py:my_reward`).
"""

import ast
import asyncio
import copy
import functools
import inspect
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo import asynchronous, python_objects
from lora_grpo.errors import RunError, UserError, first_line, suggestion
from lora_grpo.files import python_file
from lora_grpo.grading import bound_names
from lora_grpo.rewards.functions import (
    DEFAULT_WEIGHTS,
    LENGTH_REWARDS,
    PLAIN_REWARDS,
    TEST_REWARDS,
    RewardFunction,
    completion_text,
    matches_pattern,
)


@dataclass(frozen=True)
class RewardSpec:
    name: str
    """The spec without its weight, such as `near_length:200`."""
    weight: float

    @property
    def file(self) -> str | None:
        """The user's file that defines the reward, if there is one."""
        file = self.name.rpartition(":")[0]
        return file if file.endswith(".py") and self.name.partition(":")[0] not in _KINDS else None


@dataclass(frozen=True)
class Reward:
    name: str
    """A short name, unique in the run. TRL logs the mean under this name, which is also the function's `__name__`."""
    weight: float
    function: "GuardedReward"
    """Called with keyword arguments, as TRL does. It raises RewardError on any failure."""


class RewardError(RunError):
    """A reward function raised an exception or returned an invalid value. The run stops."""


RIGHT_REWARDS = ("correct_answer", *TEST_REWARDS)
"""The rewards that depend on a correct answer."""

_FORMAT_WORDS = re.compile(r"(?<![a-z])(?:format|pattern|tag_count|integer_answer)")
_NUMBER = "([1-9][0-9]{0,8})"
_ARGUMENTS = dict.fromkeys(LENGTH_REWARDS, (f"{_NUMBER}(characters|tokens)?", "200 or {}:50tokens")) | {
    "repetition_penalty": (_NUMBER, "3"),
    "soft_overlong_punishment": (f"{_NUMBER},{_NUMBER}", "1000,200"),
}
"""The form of the argument of each of `LENGTH_REWARDS`, and an example."""
_KINDS = (*LENGTH_REWARDS, "pattern")
_NAMES = [*PLAIN_REWARDS, *LENGTH_REWARDS, "pattern"]


def is_format_reward(name: str) -> bool:
    """Return whether a reward depends only on the format of a completion, not on its correctness.

    `name` is a spec or the short name of a reward. A user's function counts if its name contains the word `format`.
    """
    return _FORMAT_WORDS.search(name.rpartition(".py:")[2]) is not None


def parse_reward_specs(items: Sequence[str]) -> tuple[RewardSpec, ...]:
    """Validate specs such as `correct_answer=2.0` without running a user's file."""
    if not items:
        raise UserError("no rewards; name at least one, e.g. --rewards correct_answer=2.0")
    specs = tuple(map(_parse, items))
    name, count = Counter(spec.name for spec in specs).most_common(1)[0]
    if count > 1:
        raise UserError(f"reward {name!r} is listed {count} times; name it once, with the sum of its weights")
    return specs


def beside(items: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return the specs in a file of this folder with paths that hold in the current one: `my_rewards.py:brief=0.5`."""
    moved = []
    for item in items:
        file = RewardSpec(item.rpartition("=")[0] or item, weight=1.0).file
        if file and not Path(file).expanduser().is_absolute():
            item = f"{folder / file}{item.removeprefix(file)}"
        moved.append(item)
    return tuple(moved)


def resolve(specs: Sequence[RewardSpec]) -> list[Reward]:
    """Import and guard the reward functions. Rewards of the same kind get numbered names: `pattern`, `pattern_2`."""
    seen: Counter[str] = Counter()
    rewards = []
    for spec in specs:
        file = Path(spec.file) if spec.file else None
        if python_objects.is_name(spec.name):
            label = python_objects.title(spec.name)
            function = python_objects.find(spec.name)
        elif file:
            label = spec.name.rpartition(":")[2]
            function = getattr(python_file.load(file, "a file with reward functions"), label, None)
            if not callable(function) or isinstance(function, type):
                raise UserError(f"{file}: {label!r} is {function!r:.60}; expected a function (completions, **columns)")
            if not _takes_columns(function):
                raise UserError(f"{file}: {label!r} must take **columns; the trainer passes them all")
        else:
            label, function = _built_in(spec.name)
        seen[label] += 1
        name = label if seen[label] == 1 else f"{label}_{seen[label]}"
        rewards.append(Reward(name, spec.weight, GuardedReward(function, name, file)))
    return rewards


def _takes_columns(function: RewardFunction) -> bool:
    """Return whether a function takes arguments with any name. Of a decorated one, only its wrapper counts."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except ValueError:  # some functions in C have no signature
        return True
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _parse(item: str) -> RewardSpec:
    name, equals, text = item.rpartition("=")
    name = name or item
    try:
        weight = float(text) if equals else DEFAULT_WEIGHTS.get(name, 1.0)
    except ValueError:
        weight = math.nan
    if item.startswith("pattern:") and (not equals or math.isnan(weight)):  # A pattern may contain `=` itself.
        raise UserError(f"reward {item!r} needs its weight; write {item}=1.0")
    if not math.isfinite(weight):
        raise UserError(f"reward {item!r}: weight {text!r} is not a finite number; write {name}=1.0")
    spec = RewardSpec(name, weight)
    if python_objects.is_name(name):
        function = python_objects.find(name)
        if not callable(function) or not _takes_columns(function):
            raise UserError(
                f"reward {function!r:.60} takes other arguments; expected a function (completions, **columns)"
            )
    elif spec.file:
        _check_file(Path(spec.file).expanduser(), name.rpartition(":")[2])
    else:
        _built_in(name)
    return spec


def _built_in(name: str) -> tuple[str, RewardFunction]:
    """Return a short label and the function of a built-in reward."""
    kind, colon, argument = name.partition(":")
    if name in PLAIN_REWARDS:
        return name, PLAIN_REWARDS[name]
    if kind == "pattern":
        if not argument:  # it would match everything
            raise UserError(r"reward 'pattern' needs a regular expression; write 'pattern:^\d+$=1.0'")
        try:
            return kind, matches_pattern(argument)
        except re.error as error:
            raise UserError(f"reward {name!r}: not a regular expression ({error})") from None
    if kind in LENGTH_REWARDS:
        form, example = _ARGUMENTS[kind]
        found = re.fullmatch(form, argument)
        given = [int(each) if each.isdigit() else each for each in (found.groups() if found else ()) if each]
        is_backward = kind == "soft_overlong_punishment" and given != sorted(given, reverse=True)
        if is_backward or (not found and (colon or kind in ("near_length", "soft_overlong_punishment"))):
            example = f"{kind}:{example.format(kind)}"
            raise UserError(f"reward {name!r} needs a length or number, got {argument!r}; write {example}")
        return kind, LENGTH_REWARDS[kind](*given)
    hint = suggestion(kind, _NAMES, otherwise=f"expected one of {', '.join(_NAMES)}, or FILE.py:FUNCTION")
    raise UserError(f"unknown reward {name!r}; {hint}")


def _check_file(path: Path, function: str) -> None:
    """Check that a file names a reward function at its top level, without running the file."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{path}: {reason}; expected a Python file that defines {function!r}") from None
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name != function:
            continue
        # A decorator may return another function, whose arguments are known when the file has run.
        if node.args.kwarg is None and not node.decorator_list:
            raise UserError(f"{path}:{node.lineno}: {function!r} must take **columns; the trainer passes them all")
    defined = set().union(*map(bound_names, tree.body))
    if function not in defined:
        hint = suggestion(function, defined, otherwise=f"it defines {', '.join(sorted(defined)) or 'nothing'}")
        raise UserError(f"{path} does not define {function!r}; {hint}")


class GuardedReward:
    """A reward function that raises RewardError if it fails or returns an invalid value.

    A bool becomes 1 or 0, and a one-element tensor becomes its number. None means that the row cannot be graded. An
    error names the line of `file`, the user's file that defines the reward. The function may be `async`.
    """

    def __init__(self, function: RewardFunction, name: str, file: Path | None = None) -> None:
        functools.update_wrapper(self, function)
        self.__name__ = self.__qualname__ = name
        self._function, self._file = function, file

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        batch = {"completions": completions, **columns}
        [returned] = call_together([self], batch)
        return returned

    def start(self, batch: Mapping[str, Any]) -> Any:
        """Call the function. Return its result, an awaitable if the function is `async`."""
        # A reward may change its arguments, which the other rewards and the trainer use as well.
        # An environment may hold what cannot be copied, such as a connection.
        copies = {
            key: copy.deepcopy(value) if isinstance(value, list) and key != "environments" else value
            for key, value in batch.items()
        }
        try:
            return self._function(**copies)
        except (Exception, SystemExit) as error:
            raise self._failed(error, batch) from error

    def numbers(self, returned: Any, batch: Mapping[str, Any]) -> list[float | None]:
        """Return the numbers in what the function returned; an exception if it is one that an `async` function raised.

        Raises:
            RewardError: these are not as many finite numbers as completions.
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
            number = None if value is None else _as_number(value)
            if number is not None and not math.isfinite(number):
                raise RewardError(
                    f"reward {self.__name__!r} returned {_shorten(value)}; expected a finite number, or None for a row "
                    f"that cannot be graded; {_describe(batch, index)}"
                )
            numbers.append(number)
        return numbers

    def _failed(self, error: BaseException, batch: Mapping[str, Any]) -> RewardError:
        place = f"{python_file.line_of(error, self._file)}: " if self._file else ""
        index = _find_failing_row(self._function, batch)
        where = "no row fails alone" if index is None else _describe(batch, index)
        return RewardError(
            f"{place}reward {self.__name__!r} raised {type(error).__name__}: {first_line(error)}; {where}"
        )


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
    """Return the values that a reward returned, of a list, an array, a tensor or a generator; None for anything else.

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
    """Return a value as a number; NaN if it is none. An element of a tensor or an array is a number, too."""
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
        row = {key: value[index : index + 1] if isinstance(value, Sequence) else value for key, value in batch.items()}
        try:
            _as_list(asynchronous.finished(function(**row)))
        except (Exception, SystemExit, asyncio.CancelledError):  # noqa: BLE001 - the caller raises the error itself
            return index
    return None


def _shorten(value: Any, characters: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= characters else text[:characters] + "…"
