"""Parse `--rewards`: validate each spec without heavy imports, then load its function and guard its values.

A spec is `NAME` or `NAME=WEIGHT`. The weight multiplies the value of the function, which is 0 to 1 for built-in rewards
and has any range for user-defined rewards. NAME is one of:

- a built-in reward, with its argument if it takes one: `correct_answer`, `near_length:200`, `near_length:50tokens`,
  `soft_overlong_punishment:1000,200`. They are listed in `functions.REWARDS`, with their default weights;
- `pattern:REGEX`, whose weight is required;
- a function that a Python file defines or imports: `my_rewards.py:my_reward`.
"""

import ast
import inspect
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_grpo import python_objects
from lora_grpo.errors import UserError, first_line, suggestion
from lora_grpo.files import python_file
from lora_grpo.grading import bound_names
from lora_grpo.rewards.functions import REWARDS, Argument, RewardFunction, matches_pattern
from lora_grpo.rewards.guard import GuardedReward

_NAMES_WITH_ARGUMENT = {"pattern", *(name for name, reward in REWARDS.items() if reward.argument)}


@dataclass(frozen=True)
class RewardSpec:
    """One entry of `--rewards`."""

    name: str
    """The spec without its weight, such as `near_length:200`."""
    weight: float

    @property
    def file(self) -> str | None:
        """The user's file that defines the reward, if there is one."""
        return _file_of(self.name)

    @property
    def function_name(self) -> str:
        """The name of the function in the user's file."""
        return self.name.rpartition(":")[2]


def _file_of(name: str) -> str | None:
    """Return FILE.py of the reward `FILE.py:FUNCTION`, None for any other reward."""
    file, _, _ = name.rpartition(":")
    built_in_name, _, _ = name.partition(":")
    # The argument of a built-in reward may look like a file: `pattern:a.py:b`.
    if not file.endswith(".py") or built_in_name in _NAMES_WITH_ARGUMENT:
        return None
    return file


@dataclass(frozen=True)
class Reward:
    """A reward function that is ready to be called."""

    name: str
    """A short name, unique in the run. TRL logs the mean under this name, which is also the function's `__name__`."""
    weight: float
    function: GuardedReward
    """Called with keyword arguments, as TRL does. It raises RewardError on any failure."""


def parse_reward_specs(items: Sequence[str]) -> tuple[RewardSpec, ...]:
    """Validate specs such as `correct_answer=2.0` without running a user's file."""
    if not items:
        raise UserError("no rewards; name at least one, e.g. --rewards correct_answer=2.0")
    specs = tuple(_parse(item) for item in items)
    [(name, count)] = Counter(spec.name for spec in specs).most_common(1)
    if count > 1:
        raise UserError(f"reward {name!r} is listed {count} times; name it once, with the sum of its weights")
    return specs


def beside(items: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return the specs of a task file in this folder, with the folder before relative paths of reward files."""
    moved_items = []
    for item in items:
        name_if_weighted, _, _ = item.rpartition("=")
        file = _file_of(name_if_weighted or item)
        if file and not Path(file).expanduser().is_absolute():
            item = f"{folder / file}{item.removeprefix(file)}"
        moved_items.append(item)
    return tuple(moved_items)


def resolve(specs: Sequence[RewardSpec]) -> list[Reward]:
    """Import and guard the reward functions. Rewards of the same kind get numbered names: `pattern`, `pattern_2`."""
    counts: Counter[str] = Counter()
    rewards = []
    for spec in specs:
        file = Path(spec.file) if spec.file else None
        if python_objects.is_name(spec.name):
            label = python_objects.title(spec.name)
            function = python_objects.find(spec.name)
        elif file:
            label = spec.function_name
            function = _users_function(file, label)
        else:
            label = spec.name.partition(":")[0]
            function = _built_in(spec.name)
        counts[label] += 1
        name = label
        if counts[label] > 1:
            name = f"{label}_{counts[label]}"
        rewards.append(Reward(name, spec.weight, GuardedReward(function, name, file)))
    return rewards


def _parse(item: str) -> RewardSpec:
    name, equals, weight_text = item.rpartition("=")
    name = name or item
    weight = REWARDS[name].default_weight if name in REWARDS else 1.0
    if equals:
        try:
            weight = float(weight_text)
        except ValueError:
            weight = math.nan
    # A pattern may contain `=` itself, so what follows the last `=` may be the end of a pattern without a weight.
    if item.startswith("pattern:") and (not equals or math.isnan(weight)):
        raise UserError(f"reward {item!r} needs its weight; write {item}=1.0")
    if not math.isfinite(weight):
        raise UserError(f"reward {item!r}: weight {weight_text!r} is not a finite number; write {name}=1.0")

    spec = RewardSpec(name, weight)
    if python_objects.is_name(name):
        _check_object(python_objects.find(name))
    elif spec.file:
        _check_file(Path(spec.file).expanduser(), spec.function_name)
    else:
        _built_in(name)
    return spec


# Built-in rewards


def _built_in(name: str) -> RewardFunction:
    """Return the function of a built-in reward, such as `near_length:200`."""
    kind, colon, argument_text = name.partition(":")
    if kind == "pattern":
        return _pattern_reward(name, argument_text)
    reward = REWARDS.get(kind)
    if reward and reward.argument:
        if not colon and not reward.argument.is_required:
            return reward.function()
        return reward.function(*_arguments(reward.argument, name, argument_text))
    if reward and not colon:
        return reward.function

    names = [*REWARDS, "pattern"]
    hint = suggestion(kind, names, otherwise=f"expected one of {', '.join(names)}, or FILE.py:FUNCTION")
    raise UserError(f"unknown reward {name!r}; {hint}")


def _arguments(argument: Argument, name: str, text: str) -> list[int | str]:
    """Return the arguments of a reward's factory. Raises UserError if the text of the spec has another form."""
    match = re.fullmatch(argument.pattern, text)
    values: list[int | str] = []
    if match:
        for group in match.groups():
            if group is not None:
                values.append(int(group) if group.isdigit() else group)

    numbers = [value for value in values if isinstance(value, int)]
    is_in_order = not argument.descends or numbers == sorted(numbers, reverse=True)
    if match is None or not is_in_order:
        kind, _, _ = name.partition(":")
        examples = " or ".join(f"{kind}:{example}" for example in argument.examples)
        order = ", the larger one first" if argument.descends else ""
        raise UserError(f"reward {name!r} needs whole numbers of 1 or more{order}, got {text!r}; write {examples}")
    return values


def _pattern_reward(name: str, pattern: str) -> RewardFunction:
    if not pattern:  # an empty pattern would match everything
        raise UserError(r"reward 'pattern' needs a regular expression; write 'pattern:^\d+$=1.0'")
    try:
        return matches_pattern(pattern)
    except re.error as error:
        raise UserError(f"reward {name!r}: not a regular expression ({error})") from None


# A user's rewards


def _check_object(function: RewardFunction) -> None:
    """Raise UserError unless a Python object can be called as a reward."""
    if not callable(function) or not _takes_columns(function):
        raise UserError(f"reward {function!r:.60}: expected a function (completions, **columns)")


def _users_function(file: Path, function_name: str) -> RewardFunction:
    """Run a user's file and return a reward function of it."""
    module = python_file.load(file, "a file with reward functions")
    function = getattr(module, function_name, None)
    if not callable(function) or isinstance(function, type):
        raise UserError(f"{file}: {function_name!r} is {function!r:.60}; expected a function (completions, **columns)")
    if not _takes_columns(function):
        raise UserError(f"{file}: {function_name!r} must take **columns; the trainer passes them all")
    return function


def _takes_columns(function: RewardFunction) -> bool:
    """Return whether a function takes arguments with any name. Of a decorated function, only the wrapper counts."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except ValueError:  # some functions in C have no signature
        return True
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _check_file(path: Path, function: str) -> None:
    """Check that a file names a reward function at its top level, without running the file."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{path}: {reason}; expected a Python file that defines {function!r}") from None

    defined_names: set[str] = set()
    for statement in tree.body:
        defined_names |= bound_names(statement)
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) or statement.name != function:
            continue
        # A decorator may return another function, whose arguments are known when the file has run.
        if statement.args.kwarg is None and not statement.decorator_list:
            raise UserError(f"{path}:{statement.lineno}: {function!r} must take **columns; the trainer passes them all")
    if function not in defined_names:
        listed_names = ", ".join(sorted(defined_names)) or "nothing"
        hint = suggestion(function, defined_names, otherwise=f"it defines {listed_names}")
        raise UserError(f"{path} does not define {function!r}; {hint}")
