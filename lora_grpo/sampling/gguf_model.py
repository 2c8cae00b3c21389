"""A model in a GGUF file: what its header says, and the run that it is a part of."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lora_grpo.commands import command
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import atomic
from lora_grpo.runs import read_record
from lora_grpo.sampling.llama_server import server_program


@dataclass(frozen=True)
class GgufModel:
    """A model in a GGUF file. In evaluations, it takes the place of a `models.ModelSpec`."""

    path: Path
    label: str
    """Its type, such as `q4_0`, or its name."""
    context_tokens: int | None
    """Maximum length of a prompt and its completion in tokens."""
    chat_template: str | None
    run_folder: Path | None
    """The run, if the file is in one of its folders, as `lora-grpo export-gguf` writes it."""
    run: Mapping[str, Any] | None
    """Its run.json."""
    adapter: None = None

    @property
    def base_name(self) -> str:
        return str(self.path)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """The digest that identifies the model, and its type."""
        return {"model": self.path.name, "gguf_sha256": atomic.sha256(self.path), "quantization": self.label}

    def without_adapter(self) -> NoReturn:
        """Raise UserError, because the adapter is merged."""
        raise UserError(
            f"--compare base needs an adapter, which is merged in {self.path}; pass --compare RUN/merged, or RUN"
        )


def read_header(path: Path) -> Any:
    """Return the `gguf.GGUFReader` of a file, which maps its tensors and reads none. UserError if it is truncated."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, LookupError, OSError, OverflowError) as error:
        raise UserError(f"{path} is not a complete GGUF file ({first_line(error)}); export it again") from None


def read_gguf(path: Path) -> GgufModel:
    """Read the header of a GGUF file, or raise a UserError if it is incomplete or llama.cpp is not installed."""
    from gguf import LlamaFileType

    if not path.is_file():
        raise UserError(f"{path} does not exist; write it with {command('export-gguf')}")
    header = read_header(path)
    server_program(path)

    def value(name: str) -> Any:
        """Return the value of a metadata field, or None."""
        field = header.get_field(name)
        return field.contents() if field else None

    try:
        file_type = LlamaFileType(value("general.file_type")).name
        label = file_type.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
    except ValueError:
        label = path.stem
    run_folder = path.resolve().parent.parent
    is_in_run = (run_folder / "run.json").is_file()
    return GgufModel(
        path=path,
        label=label,
        context_tokens=value(f"{value('general.architecture')}.context_length"),
        chat_template=value("tokenizer.chat_template"),
        run_folder=run_folder if is_in_run else None,
        run=read_record(run_folder) if is_in_run else None,
    )
