"""An Ollama Modelfile: the file, the chat as a Go template, the training system prompt, and what ends an answer.

Ollama does not run the chat template of a GGUF; of those it knows it has Go versions, and others it passes over. So the
template is read off by rendering conversations of marked messages, and kept only if it then renders others as the
original does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import atomic
from lora_grpo.gguf_export.tokenizer import Vocabulary
from lora_grpo.tasks import chat


@dataclass(frozen=True)
class Turns:
    """A chat template that puts fixed text around every message."""

    opening: str
    """Where there is no system message: a template may bring a system prompt of its own."""
    system: tuple[str, str]
    user: tuple[str, str]
    """What follows a question begins the answer."""
    assistant: tuple[str, str]

    def render(self, messages: Sequence[chat.Message]) -> str:
        """Return the text that the model continues."""
        text = "" if messages[0]["role"] == "system" else self.opening
        for message in messages:
            before, after = getattr(self, message["role"])
            text += before + message["content"] + after
        return text

    def go(self) -> str:
        """Return the same as a Go template for Ollama."""
        roles = [
            f'{{{{ if eq .Role "{role}" }}}}{_go(before)}{{{{ .Content }}}}{_go(after)}{{{{ end }}}}'
            for role, (before, after) in (("system", self.system), ("user", self.user), ("assistant", self.assistant))
        ]
        opening = f"{{{{ if not .System }}}}{_go(self.opening)}{{{{ end }}}}" if self.opening else ""
        return f"{opening}{{{{ range .Messages }}}}{''.join(roles)}{{{{ end }}}}"


def write_modelfile(
    gguf: Path, tokenizer: Any, vocabulary: Vocabulary, system_prompt: str | None, temperature: float | None
) -> tuple[Path, list[str]]:
    """Write `<gguf>.Modelfile` and return its path, and what a user should know.

    Args:
        gguf: the file it is for, in the same folder.
        tokenizer: the model's.
        vocabulary: the same as the GGUF has it.
        system_prompt: what the model was trained under; None or "" for none.
        temperature: of its samples; None leaves Ollama's own.
    """
    notes = []
    lines = [f"FROM ./{gguf.name}"]
    turns = read_turns(tokenizer, vocabulary)
    template = None if turns is None else quoted(turns.go())
    if template is None:
        notes.append(
            "the Modelfile has no TEMPLATE, as the chat template is more than text around messages; Ollama takes one "
            "of its own if it knows the model's, and else none: compare an answer"
        )
    else:
        lines.append(f"TEMPLATE {template}")
    if system_prompt:
        system = quoted(system_prompt)
        if system is None:
            notes.append('the Modelfile has no SYSTEM, as a line of the system prompt ends in """')
        else:
            lines.append(f"SYSTEM {system}")
    lines += [f'PARAMETER stop "{vocabulary.tokens[token_id]}"' for token_id in vocabulary.ends]
    if temperature is not None:
        lines.append(f"PARAMETER temperature {temperature:g}")
    path = gguf.with_name(f"{gguf.name.removesuffix('.gguf')}.Modelfile")
    atomic.write_text(path, "\n".join(lines) + "\n")
    return path, notes


def read_turns(tokenizer: Any, vocabulary: Vocabulary) -> Turns | None:
    """Read the fixed text around messages off a chat template; None where that is not all it does.

    White space at the ends of a message, which some templates cut off and Go templates cannot, is left out of account.
    """
    if "strftime_now" in str(tokenizer.chat_template):  # the text would stay that of the day of the export
        return None
    # llama.cpp puts the first token there itself.
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
        before_system, after_system, between, next_turn, asked = around("#a#", "#b#", "#c#", "#d#", system=True)
        after_answer = around("#a#", "#b#", "#c#", system=True, answered=True)[-1]
        bare, _ = around("#a#", system=False)
        before_user = next_turn.removeprefix(after_answer)
        turns = Turns(
            opening=bare.removesuffix(before_user),
            system=(before_system, after_system.removesuffix(before_user)),
            user=(before_user, asked),
            assistant=(between.removeprefix(asked), after_answer),
        )
        lengths = [(1, False), (2, True), (3, False), (4, True), (5, False), (6, True), (7, False)]
        for length, system in lengths:
            contents = [f"Message {number}:\n\n{{{{ {number} }}}} <b>\u00e9</b>" for number in range(length)]
            if turns.render(_conversation(contents, system=system)) != text(*contents, system=system):
                return None
    except (UserError, ValueError):  # it refuses the messages, or leaves one out
        return None
    return turns


def _conversation(contents: Sequence[str], *, system: bool) -> list[chat.Message]:
    roles = ["system"] * system + ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def _go(text: str) -> str:
    """Write plain text in a Go template."""
    return text.replace("{{", '{{ "{{" }}')


def quoted(text: str) -> str | None:
    """Write text as a value of a Modelfile, which has no escapes; None where Ollama would take it to end early.

    Ollama ends a value at the first line end before which it is a whole quotation.
    """
    early = re.finditer(r"[\r\n]", text)
    if any(('"""' + text[: end.start()]).rstrip().endswith('"""') and text[: end.start()].strip() for end in early):
        return None
    return f'"""{text}"""'
