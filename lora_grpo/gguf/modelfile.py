"""Write an Ollama Modelfile: the GGUF file, a Go chat template, the training system prompt, and the stop tokens.

The same values are written as `template`, `system` and `params`, which `ollama run hf.co/YOU/NAME` reads from a
repository on the Hub in place of a Modelfile. Source: https://huggingface.co/docs/hub/ollama

Ollama ignores the chat template of a GGUF file unless it recognizes it. This module renders conversations with
placeholder messages and converts the fixed text around them to a Go template. The template is kept only if it renders
other conversations the same way as the original.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import atomic
from lora_grpo.gguf.tokenizer import Vocabulary
from lora_grpo.prompts import chat

HUB_FILES = ("template", "system", "params")
"""The files that Hugging Face's documentation names for Ollama."""

_NO_TEMPLATE = (
    "the Modelfile has no TEMPLATE because the chat template does more than add text around messages; Ollama uses its "
    "own if it knows the model, or none: compare an answer"
)

_NO_SYSTEM = (
    "the Modelfile has no SYSTEM because Ollama's format cannot contain the system prompt of the training: it has "
    "triple quotes at the end of a line, or invisible characters; pass the prompt with each chat"
)

_TRIMS = (
    "the model's chat template removes spaces and empty lines around messages, and the TEMPLATE in the Modelfile "
    "cannot; send messages without them"
)
_SURROGATE = "the system prompt has half of a character (a lone surrogate), which is written as ?"

_COMMAND = re.compile(
    r"^[ \t]*(?:(?:PARAMETER|MESSAGE)[ \t]+\S+|(?P<name>\w+))[ \t]+"
    r'(?:"""(?P<long>[\s\S]*?)"""[ \t]*(?=[\r\n]|\Z)|"(?P<quoted>[\s\S]*?)"[ \t]*(?=[\r\n]|\Z)|(?P<bare>[^\r\n]*))',
    re.MULTILINE | re.IGNORECASE,
)
"""A command of a Modelfile with its value, which may have several lines in quotes."""


@dataclass(frozen=True)
class Turns:
    """A chat template that adds fixed text around every message."""

    opening: str
    """Text at the start of a chat without a system message, such as a default system prompt."""
    roles: dict[str, tuple[str, str]]
    """Text before and after a message of each role. The text after a user message starts the answer."""
    ending: str = ""
    """Text at the end of the prompt, which is not repeated before earlier answers, such as an empty thinking block."""
    trims: bool = False
    """Whether the chat template removes white space around messages, which `render` and the Go template keep."""

    def render(self, messages: Sequence[chat.Message]) -> str:
        text = "" if messages[0]["role"] == "system" else self.opening
        for message in messages:
            before, after = self.roles[message["role"]]
            text += before + message["content"] + after
        return text + self.ending

    def to_go(self) -> str:
        roles = [
            f'{{{{ if eq .Role "{role}" }}}}{_go(before)}{{{{ .Content }}}}{_go(after)}{{{{ end }}}}'
            for role, (before, after) in self.roles.items()
        ]
        opening = f"{{{{ if not .System }}}}{_go(self.opening)}{{{{ end }}}}" if self.opening else ""
        return f"{opening}{{{{ range .Messages }}}}{''.join(roles)}{{{{ end }}}}{_go(self.ending)}"


def modelfile_path(gguf: Path) -> Path:
    return gguf.with_name(f"{gguf.name.removesuffix('.gguf')}.Modelfile")


def model_references(modelfile: str) -> list[tuple[str, str]]:
    """Return the commands of a Modelfile that name a model or a file, FROM and ADAPTER, with their values."""
    references = []
    for command in _COMMAND.finditer(modelfile):
        name = (command["name"] or "").upper()
        if name in ("FROM", "ADAPTER"):
            value = command["long"] or command["quoted"] or command["bare"] or ""
            references.append((name, value.strip()))
    return references


def write_modelfiles(
    ggufs: Sequence[Path], tokenizer: Any, vocabulary: Vocabulary, system_prompt: str | None
) -> list[str]:
    """Write the Modelfile of each GGUF file of a model and the files for the Hub, and return notes for the user."""
    folder = ggufs[0].parent
    turns = read_turns(tokenizer, vocabulary)
    template = turns.to_go() if turns else ""
    notes = [] if template else [_NO_TEMPLATE]
    if turns and turns.trims:
        notes.append(_TRIMS)
    if system_prompt:
        encodable = system_prompt.encode(errors="replace").decode()
        notes += [_SURROGATE] * (encodable != system_prompt)
        system_prompt = encodable
    stops = [vocabulary.tokens[token_id] for token_id in vocabulary.eos_token_ids]

    lines = []
    system_value = _value(system_prompt) if system_prompt else None
    if system_prompt and system_value is None and turns:
        # The template can write any text, so the prompt becomes the one for chats without a system message.
        before, after = turns.roles["system"]
        lines.append(f"TEMPLATE {_value(replace(turns, opening=before + system_prompt + after).to_go())}")
    elif template:
        lines.append(f"TEMPLATE {_value(template)}")
    if system_value is not None:
        lines.append(f"SYSTEM {system_value}")
    elif system_prompt and not turns:
        notes.append(_NO_SYSTEM)
    for stop in stops:
        value = _value(stop, preferred='"')
        if value is None:
            notes.append(f"the Modelfile has no PARAMETER stop {stop!r}, which Ollama's format cannot contain")
        else:
            lines.append(f"PARAMETER stop {value}")

    contents = (template, system_prompt or "", json.dumps({"stop": stops}))
    for gguf in ggufs:
        atomic.write_text(modelfile_path(gguf), "\n".join([f"FROM ./{gguf.name}", *lines]) + "\n")
    for name, content in zip(HUB_FILES, contents, strict=True):
        if content:
            atomic.write_text(folder / name, content)
        else:
            (folder / name).unlink(missing_ok=True)  # of an older export
    return notes


def _value(text: str, preferred: str = '"""') -> str | None:
    """Return a text as a value of a Modelfile in the preferred quotes, or others; None if none are read back unchanged.

    Ollama drops characters that are not printable, and a value ends at the first line end where it is complete: bare,
    or with the quotes that it starts with. There are no escapes. Source: ParseFile in Ollama's parser/parser.go
    """
    if not all(character.isprintable() or character in "\t\r\n" for character in text):
        return None
    for quotes in dict.fromkeys([preferred, '"""', '"', ""]):
        value = f"{quotes}{text}{quotes}"
        if _as_ollama_reads(value) == text:
            return value
    return None


def _as_ollama_reads(value: str) -> str | None:
    """Return the text that Ollama reads from a value at the end of a Modelfile; None if the value does not end."""
    ends = [found.start() for found in re.finditer("[\r\n]", value)]
    for end in [*ends, len(value)]:
        written = value[:end].strip()
        quotes = next((quotes for quotes in ('"""', '"') if written.startswith(quotes)), "")
        if not quotes:
            return written
        if len(written) >= 2 * len(quotes) and written.endswith(quotes):
            return written[len(quotes) : -len(quotes)]
    return None


def read_turns(tokenizer: Any, vocabulary: Vocabulary) -> Turns | None:
    """Return the fixed text around messages in a chat template, or None if the template is more complex."""
    if "strftime_now" in str(tokenizer.chat_template):  # the export date would become fixed text
        return None
    # llama.cpp adds the BOS token itself.
    first = tokenizer.bos_token if vocabulary.add_bos and tokenizer.chat_template else ""

    def text(*contents: str, system: bool, answered: bool = False) -> str:
        messages = _conversation(contents, system=system)
        if answered and tokenizer.chat_template:
            whole = str(tokenizer.apply_chat_template(messages, tokenize=False))
        else:
            whole = chat.render(tokenizer, messages)
        return whole.removeprefix(first)

    def around(*contents: str, system: bool, answered: bool = False) -> list[str]:
        return re.split("|".join(contents), text(*contents, system=system, answered=answered))

    try:
        before_system, after_system, between, next_turn, generation = around("#a#", "#b#", "#c#", "#d#", system=True)
        after_answer = around("#a#", "#b#", "#c#", system=True, answered=True)[-1]
        bare, _ = around("#a#", system=False)
        ending = generation.removeprefix(between) if generation.startswith(between) else ""
        generation = generation.removesuffix(ending)
        before_user = next_turn.removeprefix(after_answer)
        roles = {
            "system": (before_system, after_system.removesuffix(before_user)),
            "user": (before_user, generation),
            "assistant": (between.removeprefix(generation), after_answer),
        }
        turns = Turns(bare.removesuffix(before_user), roles, ending)
        if _value(turns.to_go()) is None:
            return None
        trims = False
        for length in range(1, 8):
            contents = [f"Message {number}:\n\n{{{{ {number} }}}} <b>\u00e9</b>" for number in range(length)]
            spaced = [f"\n \t{content}\t \n" for content in contents]
            system = length % 2 == 0
            if turns.render(_conversation(contents, system=system)) != text(*contents, system=system):
                return None
            trims |= turns.render(_conversation(spaced, system=system)) != text(*spaced, system=system)
    except (UserError, ValueError):  # the template rejects these messages or omits one
        return None
    return replace(turns, trims=trims)


def _conversation(contents: Sequence[str], *, system: bool) -> list[chat.Message]:
    roles = ["system"] * system + ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def _go(text: str) -> str:
    """Return a Go template that writes a text. What a template or a Modelfile cannot contain is a quoted string."""
    unprintable = {character for character in text if not character.isprintable()} - set("\t\r\n")
    pattern = "|".join([r"\{\{", '"{3,}', *map(re.escape, sorted(unprintable))])
    return re.sub(pattern, _quoted, text)


def _quoted(found: re.Match[str]) -> str:
    characters = [character if character.isprintable() else f"\\U{ord(character):08x}" for character in found[0]]
    return '{{ "' + "".join(characters).replace('"', '\\"') + '" }}'
