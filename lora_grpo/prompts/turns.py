"""The turns of a conversation in the format of the chat template: parse the model's, render what follows.

A conversation is one sequence of tokens. Tokens that the model sampled stay as they are; the template only renders what
follows them. (Templates that remove the thoughts of earlier turns would render another text for the whole
conversation, see docs/decisions/0029-conversations.md.)
"""

import json
import types
from collections.abc import Container, Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.prompts import chat, template_variables, thoughts

_MARK = "\u2042"
"""Stands for the model's answer in a rendered conversation."""

THOUGHT_FIELDS = ("reasoning_content", "thinking")
"""The keys of a message under which chat templates have the model's thoughts."""

_GUESSED_TYPES = {"name": "json", "args": {"allow_non_json": True}}
"""How a response template reads values that may be JSON or plain text."""


class MalformedCall(ValueError):
    """The model's turn contains a tool call that cannot be parsed."""


def response_format(tokenizer: Any) -> dict[str, Any]:
    """Return the `response_template` with which transformers parses the tool calls of a chat template.

    Raises:
        UserError: the template has no tool calls, or none of a known format.
    """
    from trl import chat_template_utils

    if not getattr(tokenizer, "chat_template", None) or not chat_template_utils.supports_tool_calling(tokenizer):
        raise UserError(
            "the model's chat template does not render tool calls; use a model whose template does, another template "
            "(--model.chat-template qwen2_5), or an environment with reply(text) and without tools"
        )
    response_template = getattr(tokenizer, "response_template", None)
    if response_template:
        return dict(response_template)

    # TRL knows the formats of some templates by their text.
    template = template_variables.without_variables(tokenizer.chat_template)
    stand_in = types.SimpleNamespace(chat_template=template)
    try:
        return dict(chat_template_utils.add_response_schema(stand_in).response_template)
    except ValueError:
        raise UserError(
            "the format of tool calls in the model's chat template is unknown: its tokenizer has no "
            "`response_template`, and TRL has none for it; try --model.chat-template qwen2_5"
        ) from None


def parse_turn(
    text: str, template: Mapping[str, Any] | None, before: str, tools: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the model's turn as a message, with `tool_calls` if there are any; not those that its thoughts contain.

    Args:
        text: the turn, with special tokens if there are tools.
        template: result of `response_format`, or None if there are no tools.
        before: the text before the turn, at least from the header of the turn.
        tools: their JSON schemas. Some formats write a number and a text alike, and only the schema tells which it is.

    Raises:
        MalformedCall: a tool call cannot be parsed.
    """
    if template is None:
        return {"role": "assistant", "content": text}
    from transformers.utils.chat_parsing import parse_response

    # Calls are read from what follows the thoughts and the blank lines after them.
    begun = thoughts.begun(before)
    answer_start = thoughts.answer_start(begun + text)
    thought = ""
    answer = text
    if answer_start:  # None in an open thought, 0 without thoughts; a closed thought ends in `text`
        answer = text[answer_start - len(begun) :].lstrip()
        thought = text.removesuffix(answer)

    # A format without types of its own needs those of the schemas. In JSON, the text "1" stays a text.
    calls_format = template["fields"].get("tool_calls", {})
    schemas = None
    if calls_format.get("content") == "xml-inline":
        schemas = [dict(tool) for tool in tools]
        template = {**template, "fields": {**template["fields"], "tool_calls": _reading_texts(calls_format)}}

    # transformers parses, and gives what a template asks for. It may be no call, or no JSON.
    try:
        parsed = parse_response(answer, dict(template), prefix=before + thought, tools=schemas)
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()  # ValueError for half a character, and for NaN
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MalformedCall(first_line(error)) from None
    calls = parsed.get("tool_calls") or []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MalformedCall("a tool call needs a name and arguments")
        if not isinstance(function.get("arguments"), dict):
            raise MalformedCall(f"the arguments of {function['name']!r:.60} must be an object")

    # The message, with thoughts under the keys that the template has for them.
    message: dict[str, Any] = {"role": "assistant", "content": parsed.get("content") or ""}
    for name in THOUGHT_FIELDS:
        if str(parsed.get(name) or "").strip():
            message[name] = parsed[name]
    if calls:
        message["tool_calls"] = calls
    return message


def _reading_texts(calls_format: Mapping[str, Any]) -> dict[str, Any]:
    """Return a format of calls that reads values as texts if it guessed their types, as those of TRL 1.14 do."""
    options = calls_format.get("content_args", {})
    if options.get("value_parser") == _GUESSED_TYPES:
        options = {**options, "value_parser": {"name": "text"}}
    return {**calls_format, "content_args": options}


def following_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text between the end of the model's answer and its next turn: the end of its turn and the messages."""
    answer: chat.Message = {"role": "assistant", "content": _MARK}
    if messages[0]["role"] != "tool":
        return _after_mark(tokenizer, answer, *messages)

    # Some templates name the tool in the header of its result, so the answer must call it.
    function = {"name": messages[0]["name"], "arguments": {}}
    answer_with_call = {**answer, "tool_calls": [{"type": "function", "function": function}]}

    # The rendered tool call stands between the answer and the end of the turn. The model has sampled its own.
    end_of_turn = _after_mark(tokenizer, answer)
    call = _after_mark(tokenizer, answer_with_call).removesuffix(end_of_turn)
    return _after_mark(tokenizer, answer_with_call, *messages).removeprefix(call)


def without_end_of_turn(following_ids: list[int], last_token: int, eos_token_ids: Container[int]) -> list[int]:
    """Return the ids of a `following_text` without the token that ends the model's turn, if the model has sampled it.

    Args:
        last_token: the last one of the model's turn. Another token that ends turns counts, too.
    """
    first_token = following_ids[0]
    both_end_turns = first_token in eos_token_ids and last_token in eos_token_ids
    if first_token == last_token or both_end_turns:
        return following_ids[1:]
    return following_ids


def answer_text(tokenizer: Any, message: Mapping[str, Any]) -> str:
    """Return the text of a reference turn, as the model must write it, without the end of the turn."""
    if not message.get("tool_calls"):
        return str(message["content"])
    end_of_turn = _after_mark(tokenizer, {"role": "assistant", "content": _MARK})
    calls = _after_mark(tokenizer, {**message, "content": _MARK}).removesuffix(end_of_turn)
    text = str(message["content"]) + calls
    return text.lstrip("\n")


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """Return the name and the arguments of each tool call, as texts: some formats write numbers as texts."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if not isinstance(arguments, Mapping):
            arguments = {"": arguments}  # malformed ones: a single value without a name
        texts = {}
        for name, value in arguments.items():
            texts[name] = value if isinstance(value, str) else json.dumps(value)
        calls.append((function["name"], texts))
    return calls


def _after_mark(tokenizer: Any, *messages: Mapping[str, Any]) -> str:
    """Return what the template writes after the mark in the first message, which answers a question."""
    question = {"role": "user", "content": "?"}
    text = chat.render_example(tokenizer, [question, *(dict(message) for message in messages)])
    _, _, text_after_mark = text.partition(_MARK)
    return text_after_mark
