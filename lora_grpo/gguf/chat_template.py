"""A chat template as Ollama's Go template.

Ollama ignores the chat template of a GGUF file unless it knows this template. This module renders conversations with
placeholder messages and converts the fixed text around them to a Go template. The template is kept only if it renders
other conversations the same way as the original.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.gguf.tokenizer import Vocabulary
from lora_grpo.prompts import chat

_MARKUP = "{{ 1 }} <b>\u00e9</b>"
"""Text in test messages that a template might escape or change: braces, a tag, and a letter beyond ASCII."""


@dataclass(frozen=True)
class FixedText:
    """The text that a chat template adds around a message."""

    before: str
    after: str


@dataclass(frozen=True)
class Turns:
    """A chat template that adds fixed text around every message."""

    opening: str
    """Text at the start of a chat without a system message, such as a default system prompt."""
    roles: dict[str, FixedText]
    """By role of the message. The text after a user message starts the answer."""
    ending: str = ""
    """Text at the end of the prompt, which is not repeated before earlier answers, such as an empty thinking block."""
    trims: bool = False
    """Whether the chat template removes white space around messages, which `render` and the Go template keep."""

    def render(self, messages: Sequence[chat.Message]) -> str:
        """Return the prompt that the Go template renders."""
        text = "" if messages[0]["role"] == "system" else self.opening
        for message in messages:
            fixed = self.roles[message["role"]]
            text += fixed.before + message["content"] + fixed.after
        return text + self.ending

    def to_go(self) -> str:
        """Return the Go template, with one condition for each role in a loop over the messages."""
        opening = ""
        if self.opening:
            opening = "{{ if not .System }}" + _go(self.opening) + "{{ end }}"
        roles = ""
        for role, fixed in self.roles.items():
            condition = '{{ if eq .Role "' + role + '" }}'
            roles += condition + _go(fixed.before) + "{{ .Content }}" + _go(fixed.after) + "{{ end }}"
        return opening + "{{ range .Messages }}" + roles + "{{ end }}" + _go(self.ending)


def read_turns(tokenizer: Any, vocabulary: Vocabulary) -> Turns | None:
    """Return the fixed text around messages in a chat template, or None if the template is more complex."""
    if "strftime_now" in str(tokenizer.chat_template):  # the export date would become fixed text
        return None
    template = _Template(tokenizer, vocabulary)
    try:
        turns = _fixed_text(template)
        trims = False
        for length in range(1, 8):
            # Every conversation ends with a question, so one of even length begins with a system message.
            has_system = length % 2 == 0
            contents = [f"Message {number}:\n\n{_MARKUP}" for number in range(length)]
            messages = _conversation(contents, has_system=has_system)
            if turns.render(messages) != template.render(messages):
                return None
            spaced_contents = [f"\n \t{content}\t \n" for content in contents]
            spaced_messages = _conversation(spaced_contents, has_system=has_system)
            if turns.render(spaced_messages) != template.render(spaced_messages):
                trims = True
    except (UserError, ValueError):  # the template rejects these messages or omits one
        return None
    return replace(turns, trims=trims)


class _Template:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        # llama.cpp adds the BOS token itself.
        self._bos = tokenizer.bos_token if vocabulary.add_bos and tokenizer.chat_template else ""

    def render(self, messages: list[chat.Message], *, is_answered: bool = False) -> str:
        """Return a prompt or, if the last message is an answer, a whole conversation, without the BOS token."""
        if is_answered and self._tokenizer.chat_template:
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        else:
            text = chat.render(self._tokenizer, messages)
        return text.removeprefix(self._bos)

    def around(self, *marks: str, has_system: bool, is_answered: bool = False) -> list[str]:
        """Return the texts before, between and after messages whose contents are `marks`."""
        messages = _conversation(marks, has_system=has_system)
        return re.split("|".join(marks), self.render(messages, is_answered=is_answered))


def _fixed_text(template: _Template) -> Turns:
    """Return the text around the messages of three conversations.

    Raises:
        UserError: the template rejects a conversation.
        ValueError: the template omits a message or repeats one.
    """
    # A system message, a question, its answer, and a question. A text between two messages ends the first and begins
    # the second.
    before_system, system_to_user, user_to_answer, answer_to_user, user_to_end = template.around(
        "#a#", "#b#", "#c#", "#d#", has_system=True
    )
    # The same conversation up to the answer, which shows what ends an answer; and a question alone.
    after_answer = template.around("#a#", "#b#", "#c#", has_system=True, is_answered=True)[-1]
    start_to_user, _ = template.around("#a#", has_system=False)

    # The text after the last question begins as the text before an earlier answer, and may have an ending of its own.
    ending = ""
    if user_to_end.startswith(user_to_answer):
        ending = user_to_end.removeprefix(user_to_answer)
    after_user = user_to_end.removesuffix(ending)
    before_user = answer_to_user.removeprefix(after_answer)
    roles = {
        "system": FixedText(before_system, system_to_user.removesuffix(before_user)),
        "user": FixedText(before_user, after_user),
        "assistant": FixedText(user_to_answer.removeprefix(after_user), after_answer),
    }
    return Turns(start_to_user.removesuffix(before_user), roles, ending)


def _conversation(contents: Sequence[str], *, has_system: bool) -> list[chat.Message]:
    """Return messages with these contents: of the system if `has_system`, then of user and assistant by turns."""
    roles = ["user", "assistant"] * len(contents)
    if has_system:
        roles = ["system", *roles]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def _go(text: str) -> str:
    """Return a Go template that writes a text.

    Parts that a template or a Modelfile cannot contain become string literals of Go: {{ "\\U00000007" }}.
    """
    unprintable = {character for character in text if not character.isprintable()} - set("\t\r\n")
    pattern = "|".join([r"\{\{", '"{3,}', *map(re.escape, sorted(unprintable))])
    return re.sub(pattern, _quoted, text)


def _quoted(match: re.Match[str]) -> str:
    characters = [character if character.isprintable() else f"\\U{ord(character):08x}" for character in match[0]]
    return '{{ "' + "".join(characters).replace('"', '\\"') + '" }}'
