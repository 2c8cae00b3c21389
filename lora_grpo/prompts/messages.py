"""Chat messages that a user wrote: check their form, and say which message is wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError

ROLES = ("system", "user", "assistant", "tool")


def checked_messages(messages: Sequence[Any], where: str, roles: Sequence[str] = ROLES) -> list[dict[str, Any]]:
    """Return messages, in which an assistant that only calls tools has an empty text in place of no content.

    Args:
        where: the place of the messages, for errors: "my_task.py: row 3: prompt".
        roles: the roles that are allowed.

    Raises:
        UserError: a message has another form than chat templates take. It is named by its number, from 1.
    """
    checked = []
    for number, message in enumerate(messages, start=1):
        checked.append(_checked_message(message, f"{where}: message {number}", roles))
    return checked


def prompt_of_record(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the entry `prompt` of a row, {"prompt": messages}, if the record has a list of messages of this name.

    The model then gets these messages in place of a question in a prompt style. For other records, return {}.

    Raises:
        UserError: a message is malformed, or the messages ask nothing.
    """
    prompt = record.get("prompt")
    if not isinstance(prompt, (list, tuple)) or not prompt:
        return {}
    messages = checked_messages(prompt, f"{where}: prompt")
    check_asks(messages, f"{where}: prompt")
    return {"prompt": messages}


def check_asks(messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise UserError if messages have no text beside that of the system."""
    texts = [message["content"] for message in messages if message["role"] != "system"]
    if not "".join(texts).strip():
        raise UserError(f"{where} has no text beside the system's; expected a message of the user")


def _checked_message(message: Any, where: str, roles: Sequence[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{where} is {message!r:.60}; expected a dictionary with 'role' and 'content'")

    role = message.get("role")
    if role not in roles:
        problem = f"{where} has the role {role!r:.60}; expected one of {', '.join(roles)}"
        if role == "developer" and "system" in roles:
            problem += "; write 'system' instead"
        raise UserError(problem)

    calls = message.get("tool_calls") or []
    if not isinstance(calls, (list, tuple)):
        raise UserError(f"{where} ({role}): tool_calls is {calls!r:.60}; expected a list of calls")
    for index, call in enumerate(calls):
        _check_call(call, f"{where} ({role}): tool_calls[{index}]")

    content = message.get("content")
    if content is None and role == "assistant" and calls:
        content = ""
    if isinstance(content, (list, tuple)):
        raise UserError(f"{where} ({role}): content is a list of parts; expected one text: join the texts of the parts")
    if not isinstance(content, str):
        raise UserError(f"{where} ({role}): content is {content!r:.60}; expected a text")
    return {**message, "content": content}


def _check_call(call: Any, where: str) -> None:
    """Check a tool call: `{"type": "function", "function": {"name", "arguments"}}`, or the inner dictionary alone."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where} is {call!r:.60}; expected a dictionary with 'function', its 'name' and 'arguments'")
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        kind = "a text" if isinstance(arguments, str) else f"{arguments!r:.60}"
        raise UserError(f"{where}.function.arguments is {kind}; expected a dictionary, as json.loads returns")
