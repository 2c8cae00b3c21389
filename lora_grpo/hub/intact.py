"""Check that files are complete before they are uploaded.

What training and merging wrote is compared with recorded digests. All other files are read as far as their format tells
where they end: safetensors, GGUF, JSON, chat templates, SentencePiece models, and Modelfiles.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from lora_grpo.commands import command
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import atomic, file_tensors, gguf_header, model_tensors
from lora_grpo.gguf import HUB_FILES, LORA_FILE, check_hub_file
from lora_grpo.merging import REPORT, read_report


def check_intact(folder: Path, kind: str, names: Sequence[str]) -> None:
    """Check that the named files are complete, and unchanged since training or merging wrote them."""
    if kind == "adapter" and (folder / atomic.MANIFEST).is_file() and (reason := atomic.damage(folder)):
        raise UserError(
            f"{folder}: {reason}; restore what training wrote, or delete {atomic.MANIFEST} if the change is intended"
        )
    for path in (folder / name for name in names):
        if path.suffix == ".safetensors":
            file_tensors(path)
        elif path.suffix == ".gguf":
            _check_gguf(path, kind)
        elif path.suffix == ".jinja":
            _check_template(path)
        elif path.name.endswith("Modelfile"):
            _check_modelfile(path)
        elif kind == "gguf" and path.name in HUB_FILES:
            check_hub_file(path)
        elif path.name == "tokenizer.model":
            _check_tokenizer_model(path)
    if kind != "merged":
        return
    model_tensors(folder)
    report = read_report(folder)
    for written in (*report.shards, *report.files) if report else ():
        path = folder / written.file
        if not path.is_file() or atomic.sha256(path) != written.sha256:
            raise UserError(
                f"{path} is missing or not as merging wrote it; delete {folder} and merge again, or delete its entry "
                f"from {REPORT} if the change is intended"
            )


def _check_gguf(path: Path, kind: str) -> None:
    """Raise a UserError if a header or a tensor of a GGUF file is missing or cut off, or if a model is an adapter."""
    from gguf import GGUFType

    content = gguf_header.value_of(gguf_header.read_header(path), "general.type")
    if kind == "gguf" and content == GGUFType.ADAPTER:
        raise UserError(
            f"{path} is an adapter, and the card of a GGUF folder is about models; move it to the folder of its "
            f"adapter as {LORA_FILE}, and push that"
        )


def _check_template(path: Path) -> None:
    """Raise a UserError if a chat template is cut off."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        # `generation`, a tag of transformers, marks the tokens of the assistant.
        text = re.sub(r"({%-?\s*)generation\b", r"\1if true", path.read_text(encoding="utf-8"))
        text = re.sub(r"({%-?\s*)endgeneration\b", r"\1endif", text)
        if not text:
            raise TemplateSyntaxError("it is empty", 1)
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except (TemplateSyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a complete chat template ({first_line(error)}); restore it") from None


def _check_modelfile(path: Path) -> None:
    """Raise a UserError if a Modelfile is cut off, or if its GGUF file is not there."""
    text = path.read_text(encoding="utf-8", errors="replace")
    source = re.search(r"^FROM +(\S.*)$", text, re.MULTILINE)
    if source is None or text.count('"""') % 2 or not text.endswith("\n"):
        raise UserError(
            f"{path} is cut off: it lacks a FROM, a closing quote or the end of its last line; write it again with "
            f"{command('export-gguf', '--modelfile')}, or complete it"
        )
    if source[1].startswith("./") and not (path.parent / source[1]).is_file():
        raise UserError(
            f"{path} needs {source[1]}, which is not in {path.parent}; export both with {command('export-gguf')}"
        )


def _check_tokenizer_model(path: Path) -> None:
    """Raise a UserError if a SentencePiece model, a protocol buffer whose fields are all messages, is cut off."""
    data, place = path.read_bytes(), 0
    with contextlib.suppress(IndexError):
        while place < len(data):
            _, place = _varint(data, place)
            size, place = _varint(data, place)
            place += size
    # Files of the same name in other formats are text.
    if not data or (data[0] == 0x0A and place != len(data)):
        raise UserError(f"{path} is not a complete SentencePiece model; restore it")


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return the number that starts at a place, in groups of seven bits, and the place after it."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
