"""From `--rewards` to functions: reads reward specs and checks them before anything heavy loads.

A spec is `NAME` or `NAME=SCALE`; the scale is what full marks are worth, by default `rewards.SCALES`, else 1. It
multiplies what the function returns: 0 to 1 for the kit's own, whatever range they have for TRL's and the user's.
A NAME is

| NAME                                              | the reward                                      |
|---------------------------------------------------|-------------------------------------------------|
| `correct_answer`, `xml_tag_count`, ...            | one of `rewards.PLAIN_REWARDS`                  |
| `near_length:200`, `near_length:50tokens`         | nearness to a length, in characters or tokens   |
| `longer_is_better`, `longer_is_better:2000`       | length up to a cap, by default 1,000 characters |
| `pattern:REGEX`                                   | the expression is found; `=SCALE` must follow   |
| `trl:think_format_reward`                         | TRL's own                                       |
| `trl:get_repetition_penalty_reward(ngram_size=4)` | TRL's own, with arguments                       |
| `my_rewards.py:my_reward`                         | a Python file's function, with TRL's signature  |
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.rewards import functions
from lora_grpo.rewards.functions import RewardFunction
from lora_grpo.rewards.guard import guard
from lora_grpo.rewards.user_files import check_file, load_file


@dataclass(frozen=True)
class RewardSpec:
    """One checked item of `--rewards`."""

    name: str
    """As written, without the scale: `near_length:200`."""
    weight: float
    """The scale: what full marks are worth."""

    def __str__(self) -> str:
        return f"{self.name}={self.weight}"


@dataclass(frozen=True)
class Reward:
    """A reward ready for the trainer."""

    name: str
    """Short and unique in the run; also the function's `__name__`, under which TRL logs its mean."""
    weight: float
    """TRL's `reward_weights` entry."""
    function: RewardFunction
    """Takes TRL's keyword arguments; raises RewardError for whatever goes wrong inside."""


@dataclass(frozen=True)
class _Trl:
    """A reward of `trl.rewards`, described here so that a spec is checked without importing TRL."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    factory: bool = False
    needs_math_verify: bool = False


TRL_REWARDS = {
    "accuracy_reward": _Trl(needs_math_verify=True),
    "reasoning_accuracy_reward": _Trl(needs_math_verify=True),
    "think_format_reward": _Trl(),
    "get_cosine_scaled_reward": _Trl(
        required=("max_len",),
        optional=("min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct"),
        factory=True,
        needs_math_verify=True,
    ),
    "get_repetition_penalty_reward": _Trl(optional=("ngram_size", "max_penalty"), factory=True),
    "get_soft_overlong_punishment": _Trl(required=("max_completion_len", "soft_punish_cache"), factory=True),
}

_Loader = Callable[[dict[Path, ModuleType]], RewardFunction]
"""Imports what the reward needs and returns its function; the dictionary keeps the users' files run so far."""

_LENGTH = re.compile(r"([1-9][0-9]{0,8})(characters|tokens)?")
_LENGTH_REWARDS: dict[str, Callable[..., RewardFunction]] = {
    "near_length": functions.near_length,
    "longer_is_better": functions.longer_is_better,
}
_NAMES = [*functions.PLAIN_REWARDS, *_LENGTH_REWARDS, "pattern", *(f"trl:{name}" for name in TRL_REWARDS)]


def parse_reward_specs(items: Sequence[str] | Mapping[str, float | None]) -> tuple[RewardSpec, ...]:
    """Check the rewards asked for, without importing TRL or running a user's file.

    Args:
        items: specs such as `correct_answer=2.0`, or a mapping from name to scale, where None is the default scale.

    Returns:
        The specs in the order given. `str(spec)` reads back as the same spec.

    Raises:
        UserError: the list is empty, a name is unknown or there twice, an argument is wrong, a scale is no finite
            number, or a file or its function is missing.
    """
    if isinstance(items, str):
        items = [items]
    pairs = list(items.items()) if isinstance(items, Mapping) else [_split_scale(item) for item in items]
    if not pairs:
        raise UserError("no rewards; name at least one, e.g. --rewards correct_answer=2.0")
    specs = []
    for name, scale in pairs:
        if not isinstance(name, str):
            raise UserError(f"reward {name!r} is not a name; expected e.g. correct_answer")
        _plan(name)
        specs.append(RewardSpec(name, _check_scale(name, _default_scale(name) if scale is None else scale)))
    name, count = Counter(spec.name for spec in specs).most_common(1)[0]
    if count > 1:
        raise UserError(f"reward {name!r} is there {count} times; name it once, with the sum of its scales")
    return tuple(specs)


def resolve(specs: Sequence[RewardSpec]) -> list[Reward]:
    """Return the reward functions, imported and guarded.

    Args:
        specs: what `parse_reward_specs` returned.

    Returns:
        One reward a spec, in order. Two of the same kind get numbered names: `pattern`, `pattern_2`.

    Raises:
        UserError: a user's file fails at import, or what it holds is not a function.
    """
    modules: dict[Path, ModuleType] = {}
    seen: Counter[str] = Counter()
    resolved = []
    for spec in specs:
        label, load = _plan(spec.name)
        seen[label] += 1
        name = label if seen[label] == 1 else f"{label}_{seen[label]}"
        resolved.append(Reward(name, spec.weight, guard(load(modules), name)))
    return resolved


def _split_scale(item: str) -> tuple[str, float | None]:
    """Split `NAME=SCALE`; the arguments of a `trl:` reward have equals signs of their own, before the last bracket."""
    name, equals, scale = item.rpartition("=")
    if not equals or item.endswith(")"):
        return item, None
    try:
        return name, float(scale)
    except ValueError:
        if item.startswith("pattern:"):
            return item, None
        raise UserError(f"reward {item!r}: scale {scale!r} is not a number; write {name}=1.0") from None


def _check_scale(name: str, scale: Any) -> float:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise UserError(f"reward {name!r}: scale {scale!r} is not a finite number; write {name}=1.0")
    return float(scale)


def _default_scale(name: str) -> float:
    if name.startswith("pattern:"):
        # A pattern may hold an equals sign itself; without this rule `pattern:x=5` would be read two ways.
        raise UserError(f"reward {name!r} needs its scale; write {name}=1.0")
    return functions.SCALES.get(name, 1.0)


def _plan(name: str) -> tuple[str, _Loader]:
    """Check a name as far as can be told without importing anything; return its short label and what loads it."""
    kind, colon, argument = name.partition(":")
    if kind == "trl" and colon:
        function, arguments = _parse_trl(name)
        return function.removeprefix("get_"), lambda modules: _load_trl(function, arguments)
    if kind == "pattern":
        pattern = _pattern(argument)
        return kind, lambda modules: pattern
    if kind in _LENGTH_REWARDS:
        length = _length_reward(name)
        return kind, lambda modules: length
    if name in functions.PLAIN_REWARDS:
        return name, lambda modules: functions.PLAIN_REWARDS[name]
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py"):
        path = Path(file).expanduser()
        check_file(path, attribute)
        return attribute, lambda modules: load_file(path, attribute, modules)
    if name.endswith(".py"):
        raise UserError(f"reward {name!r} names no function; write {name}:my_reward")
    if kind in functions.PLAIN_REWARDS:
        raise UserError(f"reward {kind!r} takes no argument, got {argument!r}; write {kind}=1.0")
    near = difflib.get_close_matches(kind, _NAMES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(_NAMES)}, or FILE.py:FUNCTION"
    raise UserError(f"unknown reward {name!r}; {hint}")


def _pattern(pattern: str) -> RewardFunction:
    if not pattern:
        raise UserError(r"reward 'pattern' needs a regular expression; write 'pattern:^\d+$=1.0'")
    try:
        return functions.matches_pattern(pattern)
    except re.error as error:
        raise UserError(f"reward 'pattern:{pattern}': not a regular expression ({error})") from None


def _length_reward(name: str) -> RewardFunction:
    kind, colon, argument = name.partition(":")
    factory = _LENGTH_REWARDS[kind]
    if not colon and kind == "longer_is_better":
        return factory()
    length = _LENGTH.fullmatch(argument)
    if length is None:
        raise UserError(f"reward {name!r} needs a length, got {argument!r}; write {kind}:200 or {kind}:50tokens")
    return factory(int(length[1]), length[2] or "characters")


def _parse_trl(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name within `trl.rewards` and the keyword arguments of `trl:NAME` or `trl:NAME(key=value, ...)`.

    Raises:
        UserError: TRL has no such reward, or its arguments are wrong.
    """
    text = name.removeprefix("trl:")
    function = text.partition("(")[0]
    if function not in TRL_REWARDS:
        near = difflib.get_close_matches(function, TRL_REWARDS, n=1)
        hint = f"did you mean 'trl:{near[0]}'?" if near else f"expected one of {', '.join(TRL_REWARDS)}"
        raise UserError(f"unknown reward {name!r}; {hint}")
    known = TRL_REWARDS[function]
    arguments: dict[str, Any] = {}
    if text != function:
        try:
            call = ast.parse(text, mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                raise ValueError
            arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        except (ValueError, SyntaxError):
            raise UserError(f"reward {name!r}: cannot read its arguments; write trl:{function}(key=1)") from None
    example = f"trl:{function}({', '.join(f'{key}=...' for key in known.required or known.optional)})"
    if arguments and not known.factory:
        raise UserError(f"reward {name!r} takes no arguments; write trl:{function}")
    for key in arguments:
        if key not in known.required + known.optional:
            raise UserError(f"reward {name!r} has no argument {key!r}; write {example}")
    for key in known.required:
        if key not in arguments:
            raise UserError(f"reward {name!r} needs the argument {key!r}; write {example}")
    if known.needs_math_verify and importlib.util.find_spec("math_verify") is None:
        raise UserError(f"reward {name!r} needs the math-verify package; pip install 'math-verify[antlr4_13_2]'")
    return function, arguments


def _load_trl(name: str, arguments: Mapping[str, Any]) -> RewardFunction:
    import trl.rewards

    reward = getattr(trl.rewards, name)
    if TRL_REWARDS[name].factory:
        try:
            reward = reward(**arguments)
        except (TypeError, ValueError) as error:
            raise UserError(f"reward 'trl:{name}': {error}") from None

    def with_messages(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        # TRL's rewards read only conversations.
        chats = [[{"role": "assistant", "content": c}] if isinstance(c, str) else c for c in completions]
        return reward(completions=chats, **columns)

    return with_messages
