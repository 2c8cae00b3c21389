"""Write an Ollama Modelfile: the GGUF file, a Go chat template, the training system prompt, and the stop tokens.

The same values are written as `template`, `system` and `params`, which `ollama run hf.co/YOU/NAME` reads from a
repository on the Hub in place of a Modelfile. Source: https://huggingface.co/docs/hub/ollama
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_grpo.files import atomic
from lora_grpo.gguf.chat_template import Turns, read_turns
from lora_grpo.gguf.tokenizer import Vocabulary

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
    r'''
    ^[ \t]*
    (?: (?:PARAMETER|MESSAGE) [ \t]+ \S+ | (?P<name>\w+) )  # these two have a word before their value
    [ \t]+
    (?:
        """ (?P<long>[\s\S]*?) """ [ \t]* (?=[\r\n]|\Z)
    |   "   (?P<quoted>[\s\S]*?) "   [ \t]* (?=[\r\n]|\Z)
    |   (?P<bare>[^\r\n]*)
    )
    ''',
    re.MULTILINE | re.IGNORECASE | re.VERBOSE,
)
"""A command of a Modelfile with its value, which may have several lines in quotes."""


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
    files = _ollama_files(ggufs, tokenizer, vocabulary, system_prompt)
    for path, content in files.contents.items():
        if content:
            atomic.write_text(path, content)
        else:
            path.unlink(missing_ok=True)  # a file of an older export
    return files.notes


def check_modelfiles(
    ggufs: Sequence[Path], tokenizer: Any, vocabulary: Vocabulary, system_prompt: str | None
) -> list[str]:
    """Return a note for the user if `write_modelfiles` would change files of an earlier export, or none.

    The files stay as they are, because the user may have edited them.
    """
    paths = [*map(modelfile_path, ggufs), *_hub_paths(ggufs)]
    if not any(path.is_file() for path in paths):
        return []
    contents = _ollama_files(ggufs, tokenizer, vocabulary, system_prompt).contents
    others = [path.name for path in paths if path.is_file() and path.read_bytes() != contents[path].encode()]
    if not others:
        return []
    return [
        f"these files do not match this export: {', '.join(others)}; they are of an earlier one, or edited; pass "
        "--modelfile to replace them"
    ]


@dataclass(frozen=True)
class _OllamaFiles:
    """The Modelfile of each GGUF file of a model, and the files for the Hub."""

    contents: dict[Path, str]
    """By path; "" for a file that the model does not need."""
    notes: list[str]


def _hub_paths(ggufs: Sequence[Path]) -> list[Path]:
    """Return the paths of HUB_FILES, which all GGUF files of a folder share."""
    return [ggufs[0].parent / name for name in HUB_FILES]


def _ollama_files(
    ggufs: Sequence[Path], tokenizer: Any, vocabulary: Vocabulary, system_prompt: str | None
) -> _OllamaFiles:
    """Return the files of `write_modelfiles`, with its notes."""
    notes = []
    turns = read_turns(tokenizer, vocabulary)
    if turns and _value(turns.to_go()) is None:
        turns = None
    if not turns:
        notes.append(_NO_TEMPLATE)
    elif turns.trims:
        notes.append(_TRIMS)
    if system_prompt:
        encodable_prompt = system_prompt.encode(errors="replace").decode()
        if encodable_prompt != system_prompt:
            notes.append(_SURROGATE)
        system_prompt = encodable_prompt
    stops = [vocabulary.tokens[token_id] for token_id in vocabulary.eos_token_ids]

    lines = _template_and_system(turns, system_prompt)
    if system_prompt and not lines:  # no SYSTEM, and no TEMPLATE that contains the prompt
        notes.append(_NO_SYSTEM)
    for stop in stops:
        value = _value(stop, preferred='"')
        if value is None:
            notes.append(f"the Modelfile has no PARAMETER stop {stop!r}, which Ollama's format cannot contain")
        else:
            lines.append(f"PARAMETER stop {value}")

    contents = {}
    for gguf in ggufs:
        contents[modelfile_path(gguf)] = "\n".join([f"FROM ./{gguf.name}", *lines]) + "\n"
    hub_contents = (turns.to_go() if turns else "", system_prompt or "", json.dumps({"stop": stops}))
    contents |= dict(zip(_hub_paths(ggufs), hub_contents, strict=True))
    return _OllamaFiles(contents, notes)


def _template_and_system(turns: Turns | None, system_prompt: str | None) -> list[str]:
    """Return the commands TEMPLATE and SYSTEM of a Modelfile, without those that cannot be written."""
    system_value = _value(system_prompt) if system_prompt else None
    lines = []
    if turns and system_prompt and system_value is None:
        # The template can write any text, so the prompt becomes the one for chats without a system message.
        fixed = turns.roles["system"]
        turns = replace(turns, opening=fixed.before + system_prompt + fixed.after)
    if turns:
        lines.append(f"TEMPLATE {_value(turns.to_go())}")
    if system_value is not None:
        lines.append(f"SYSTEM {system_value}")
    return lines


def _value(text: str, preferred: str = '"""') -> str | None:
    """Return a text as a value of a Modelfile, in the preferred quotes if Ollama reads the text back, or in others.

    None if Ollama reads another text in all quotes.

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
    line_ends = [match.start() for match in re.finditer("[\r\n]", value)]
    for end in [*line_ends, len(value)]:
        written = value[:end].strip()
        if written.startswith('"""'):
            quotes = '"""'
        elif written.startswith('"'):
            quotes = '"'
        else:
            return written
        if len(written) >= 2 * len(quotes) and written.endswith(quotes):
            return written[len(quotes) : -len(quotes)]
    return None
