"""Parse `--rewards`: validate each spec without heavy imports, then load its function.

A spec is `NAME` or `NAME=WEIGHT`. The weight multiplies the value of the function, which is 0 to 1 for built-in rewards
and has any range for TRL and user-defined rewards. `functions.DEFAULT_WEIGHTS` has the default weights. NAME is one of:

| NAME                                        | reward                                                |
|---------------------------------------------|-------------------------------------------------------|
| `correct_answer`, `xml_tag_count`, ...      | one of `functions.PLAIN_REWARDS`                      |
| `near_length:200`, `near_length:50tokens`   | closeness to a length in characters or tokens         |
| `longer_is_better`, `longer_is_better:2000` | length up to a cap (default: 1,000 characters)        |
| `pattern:REGEX`                             | the regular expression matches; `=WEIGHT` is required |
| `trl:think_format_reward`                   | one of `TRL_REWARDS`                                  |
| `my_rewards.py:my_reward`                   | a function in a Python file, with TRL's signature     |
"""

from __future__ import annotations

import ast
import importlib.util
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line, suggestion
from lora_grpo.files import python_file
from lora_grpo.rewards.functions import (
    DEFAULT_WEIGHTS,
    LENGTH_REWARDS,
    PLAIN_REWARDS,
    RewardFunction,
    matches_pattern,
)
from lora_grpo.rewards.guard import guard


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

    def __str__(self) -> str:
        return f"{self.name}={self.weight}"


@dataclass(frozen=True)
class Reward:
    name: str
    """A short name, unique in the run. TRL logs the mean under this name, which is also the function's `__name__`."""
    weight: float
    function: RewardFunction
    """The guarded function. TRL calls it with keyword arguments; it raises RewardError on any failure."""
    is_own: bool = False
    """Whether it is defined in a user's file."""


TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Rewards in `trl.rewards` that need no arguments. A user's file can define the others."""

RIGHT_REWARDS = (
    *("correct_answer", "passes_tests", "share_of_tests_passed"),
    *("accuracy_reward", "reasoning_accuracy_reward"),
)
"""Short names of the rewards for a correct answer."""

_FORMAT_WORDS = re.compile(r"(?<![a-z])(?:format|pattern|tag_count|integer_answer)")
_LENGTH = re.compile(r"([1-9][0-9]{0,8})(characters|tokens)?")
_KINDS = (*LENGTH_REWARDS, "pattern", "trl")
_NAMES = [*PLAIN_REWARDS, *LENGTH_REWARDS, "pattern", *(f"trl:{name}" for name in TRL_REWARDS)]


def is_format_reward(name: str) -> bool:
    """Return whether a reward depends only on the format of a completion, whether it is right or wrong.

    `name` is a spec or the short name of a reward. A user's function is one if its name has the word `format`.
    """
    return _FORMAT_WORDS.search(name.rpartition(".py:")[2]) is not None


def parse_reward_specs(items: Sequence[str]) -> tuple[RewardSpec, ...]:
    """Validate specs such as `correct_answer=2.0` without importing TRL or running a user's file."""
    if not items:
        raise UserError("no rewards; name at least one, e.g. --rewards correct_answer=2.0")
    specs = tuple(map(_parse, items))
    name, count = Counter(spec.name for spec in specs).most_common(1)[0]
    if count > 1:
        raise UserError(f"reward {name!r} is listed {count} times; name it once, with the sum of its weights")
    return specs


def resolve(specs: Sequence[RewardSpec]) -> list[Reward]:
    """Import and guard the reward functions. Rewards of the same kind get numbered names: `pattern`, `pattern_2`."""
    seen: Counter[str] = Counter()
    rewards = []
    for spec in specs:
        label, load = _find(spec.name)
        seen[label] += 1
        name = label if seen[label] == 1 else f"{label}_{seen[label]}"
        file = Path(spec.file) if spec.file else None
        rewards.append(Reward(name, spec.weight, guard(load(), name, file), is_own=file is not None))
    return rewards


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
    _find(name)
    return RewardSpec(name, weight)


def _find(name: str) -> tuple[str, Callable[[], RewardFunction]]:
    """Check a name without heavy imports. Return a short label and a function that loads the reward."""
    kind, colon, argument = name.partition(":")
    file, _, function = name.rpartition(":")
    if name in PLAIN_REWARDS:
        return name, lambda: PLAIN_REWARDS[name]
    if kind == "pattern":
        if not argument:
            raise UserError(r"reward 'pattern' needs a regular expression; write 'pattern:^\d+$=1.0'")
        try:
            pattern = matches_pattern(argument)
        except re.error as error:
            raise UserError(f"reward {name!r}: not a regular expression ({error})") from None
        return kind, lambda: pattern
    if kind in LENGTH_REWARDS:
        length = _LENGTH.fullmatch(argument)
        if not length and (colon or kind == "near_length"):
            raise UserError(f"reward {name!r} needs a length, got {argument!r}; write {kind}:200 or {kind}:50tokens")
        return kind, lambda: LENGTH_REWARDS[kind](*[int(length[1]), length[2] or "characters"] if length else [])
    if kind == "trl":
        if argument not in TRL_REWARDS:
            known = [f"trl:{each}" for each in TRL_REWARDS]
            raise UserError(f"unknown reward {name!r}; {suggestion(name, known)}; define others in a file")
        if "accuracy" in argument and importlib.util.find_spec("math_verify") is None:
            raise UserError(f"reward {name!r} needs the math-verify package; pip install 'math-verify[antlr4_13_2]'")
        return argument, lambda: _load_trl(argument)
    if file.endswith(".py"):
        path = Path(file).expanduser()
        _check_file(path, function)
        return function, lambda: _load_file(path, function)
    hint = suggestion(kind, _NAMES, otherwise=f"expected one of {', '.join(_NAMES)}, or FILE.py:FUNCTION")
    raise UserError(f"unknown reward {name!r}; {hint}")


def _load_trl(name: str) -> RewardFunction:
    import trl.rewards

    reward = getattr(trl.rewards, name)

    def with_messages(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        # TRL's rewards accept only conversations.
        chats = [[{"role": "assistant", "content": c}] if isinstance(c, str) else c for c in completions]
        return reward(completions=chats, **columns)

    return with_messages


def _check_file(path: Path, function: str) -> None:
    """Check that a file names a reward function at its top level, without running the file."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a Python file that defines {function!r}") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} is not Python: {first_line(error)}") from None
    defined: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            defined.append(node.name)
            if node.name == function and node.args.kwarg is None:
                raise UserError(f"{path}:{node.lineno}: {function!r} must take **columns; the trainer passes them all")
        elif isinstance(node, ast.Assign):
            defined += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined += [alias.asname or alias.name for alias in node.names]
    if function not in defined:
        hint = suggestion(function, defined, otherwise=f"it defines {', '.join(defined) or 'nothing'}")
        raise UserError(f"{path} does not define {function!r}; {hint}")


def _load_file(path: Path, function: str) -> RewardFunction:
    reward = getattr(python_file.load(path, "a file with reward functions"), function)
    if not callable(reward):
        raise UserError(f"{path}: {function!r} is {reward!r:.60}; expected a function (completions, **columns)")
    return reward
