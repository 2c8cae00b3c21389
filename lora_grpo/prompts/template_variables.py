"""Variables of chat templates, such as `enable_thinking`: parse them, and write them into the template itself.

A variable that is set stands in a line at the start of the template, `{% set NAME = NAME | default(VALUE) %}`. The
template is saved with the tokenizer, so the sampler, the trainer and every program that loads a saved model render the
same prompts.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo import console
from lora_grpo.errors import UserError

KWARGS_FLAG = "--model.chat-template-kwargs"
THINKING_TOKENS = 2048
"""Minimum completion length for which models with a switch think, four times the limit of the GPU presets."""

_THINKING_SWITCH = "enable_thinking"
_DEFAULTS: dict[str, Any] = {
    # Only for templates that `set_variables` has not seen, such as those of earlier runs.
    _THINKING_SWITCH: False,
    # Llama 3.2 shows today's date, and a run that is resumed or evaluated on another day must have the same prompts.
    # This is the template's own default.
    "date_string": "26 Jul 2024",
}
_SET_LINE = re.compile(r"\{% set (\w+) = \1 \| default\((.*)\) %\}\n")


def parse_kwargs(items: Sequence[str]) -> dict[str, Any]:
    """Convert `["enable_thinking=false"]` to variables of a chat template. Values are JSON scalars, or else text."""
    values: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        value: Any = text
        with contextlib.suppress(ValueError):
            value = json.loads(text, parse_constant=str)  # NaN is not JSON

        if name == _THINKING_SWITCH:
            # `False` would be text, which templates take as true.
            is_valid = isinstance(value, bool)
            expected = "true or false"
        else:
            is_valid = not isinstance(value, (dict, list))
            expected = "KEY=VALUE with text, a number, true or false"
        if not equals or not name.isidentifier() or not is_valid:
            raise UserError(f"{KWARGS_FLAG} {item}: expected {expected}")
        values[name] = value
    return values


def set_variables(
    tokenizer: Any, new_values: Mapping[str, Any], max_tokens: int, *, quiet: bool = False
) -> dict[str, Any]:
    """Set variables of the chat template, in lines at its start, and return all that are set.

    The lines are defaults: a caller can still pass other values.

    If the template has a switch for thinking that is not set, the value depends on `max_tokens`. It is printed, unless
    `quiet`.

    Args:
        new_values: variables to set. Those that the template has set already stay.
        max_tokens: maximum number of tokens of a completion.

    Raises:
        UserError: one of `new_values` does not occur in the template.
    """
    template = ""
    if getattr(tokenizer, "chat_template", None):
        template = tokenizer.get_chat_template()
    values_before, body = _split(template)
    for name in new_values:
        if not re.search(rf"\b{name}\b", body):
            raise UserError(f"{KWARGS_FLAG} {name}: the model's chat template does not read it; leave it out")

    values = {**values_before, **new_values}
    if _THINKING_SWITCH in body:
        if _THINKING_SWITCH in new_values:
            reason = f"{KWARGS_FLAG} sets {_THINKING_SWITCH}"
        elif _THINKING_SWITCH in values:
            reason = f"its chat template sets {_THINKING_SWITCH}"
        else:
            thinks = max_tokens >= THINKING_TOKENS
            values[_THINKING_SWITCH] = thinks
            reason = (
                f"completions have at most {max_tokens} tokens, and {THINKING_TOKENS} leave room for it; "
                f"to change it: {KWARGS_FLAG} {_THINKING_SWITCH}={json.dumps(not thinks)}"
            )
        if not quiet:
            state = "on" if values[_THINKING_SWITCH] else "off"
            console.note(f"thinking: {state}, because {reason}")

    if values != values_before:
        lines = [f"{{% set {name} = {name} | default({_literal(value)}) %}}\n" for name, value in values.items()]
        tokenizer.chat_template = "".join(lines) + body
    return values


def variables(template: Any) -> dict[str, Any]:
    """Return the variables that prompts are rendered with. Templates ignore those that they do not read.

    Args:
        template: the chat template of a tokenizer: a text, or a dictionary of several, in which no variables are set.
    """
    if not isinstance(template, str):
        return dict(_DEFAULTS)
    values, _ = _split(template)
    return {**_DEFAULTS, **values}


def with_fixed_variables(template: str) -> str:
    """Return a chat template whose variables cannot be changed. llama.cpp, for example, passes `enable_thinking`."""
    values, body = _split(template)
    lines = [f"{{% set {name} = {_literal(value)} %}}\n" for name, value in values.items()]
    return "".join(lines) + body


def without_variables(template: str) -> str:
    """Return a chat template as the model's authors wrote it, without the lines that `set_variables` added."""
    _, body = _split(template)
    return body


def _split(template: str) -> tuple[dict[str, Any], str]:
    """Return the variables that `set_variables` has set in a template, and the template without these lines."""
    values: dict[str, Any] = {}
    body_start = 0
    while line := _SET_LINE.match(template, body_start):
        name, literal = line.groups()
        values[name] = None if literal == "none" else json.loads(literal)
        body_start = line.end()
    return values, template[body_start:]


def _literal(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
