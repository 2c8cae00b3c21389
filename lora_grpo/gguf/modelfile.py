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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import atomic
from lora_grpo.gguf.tokenizer import Vocabulary
from lora_grpo.tasks import chat

HUB_FILES = ("template", "system", "params")
"""The files that Hugging Face's documentation names for Ollama."""

_NO_TEMPLATE = (
    "the Modelfile has no TEMPLATE because the chat template does more than add text around messages; Ollama uses its "
    "own if it knows the model, or none: compare an answer"
)


@dataclass(frozen=True)
class Turns:
    """A chat template that adds fixed text around every message."""

    opening: str
    """Text at the start of a chat without a system message, such as a default system prompt."""
    roles: dict[str, tuple[str, str]]
    """Text before and after a message of each role. The text after a user message starts the answer."""
    ending: str = ""
    """Text at the end of the prompt, which is not repeated before earlier answers, such as an empty thinking block."""

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


def write_modelfiles(
    ggufs: Sequence[Path], tokenizer: Any, vocabulary: Vocabulary, system_prompt: str | None
) -> list[str]:
    """Write the Modelfile of each GGUF file of a model and the files for the Hub, and return notes for the user."""
    turns, folder = read_turns(tokenizer, vocabulary), ggufs[0].parent
    template = turns.to_go() if turns else ""
    stops = [vocabulary.tokens[token_id] for token_id in vocabulary.eos_token_ids]
    lines = [f'TEMPLATE """{template}"""'] if template else []
    lines += [f'SYSTEM """{system_prompt}"""'] if system_prompt else []
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    contents = (template, system_prompt or "", json.dumps({"stop": stops}))
    for gguf in ggufs:
        atomic.write_text(modelfile_path(gguf), "\n".join([f"FROM ./{gguf.name}", *lines]) + "\n")
    for name, content in zip(HUB_FILES, contents, strict=True):
        if content:
            atomic.write_text(folder / name, content)
        else:
            (folder / name).unlink(missing_ok=True)  # of an older export
    return [] if template else [_NO_TEMPLATE]


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
        if '"""' in turns.to_go():  # this would end the TEMPLATE
            return None
        for length in range(1, 8):
            contents = [f"Message {number}:\n\n{{{{ {number} }}}} <b>\u00e9</b>" for number in range(length)]
            system = length % 2 == 0
            if turns.render(_conversation(contents, system=system)) != text(*contents, system=system):
                return None
    except (UserError, ValueError):  # the template rejects these messages or omits one
        return None
    return turns


def _conversation(contents: Sequence[str], *, system: bool) -> list[chat.Message]:
    roles = ["system"] * system + ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def _go(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')
