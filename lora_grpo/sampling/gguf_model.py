"""A GGUF file to evaluate: what its header says, and the run that it belongs to."""

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
    """Return the `gguf.GGUFReader` of a file, which maps its tensors and reads none of them.

    Raises:
        UserError: a header or a tensor is missing or cut off.
    """
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, LookupError, OSError, OverflowError) as error:
        raise UserError(f"{path} is not a complete GGUF file ({first_line(error)}); export it again") from None


def read_gguf(path: Path) -> GgufModel:
    """Read the header of a GGUF file. It is not loaded.

    Raises:
        UserError: there is no such file, or it is cut off.
    """
    from gguf import LlamaFileType

    if not path.is_file():
        raise UserError(f"{path} does not exist; write it with {command('export-gguf')}")
    header = read_header(path)

    def value(name: str) -> Any:
        field = header.get_field(name)
        return field.contents() if field else None

    try:
        label = LlamaFileType(value("general.file_type")).name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
    except ValueError:
        label = path.stem
    above = path.resolve().parent.parent
    run = above if (above / "run.json").is_file() else None
    return GgufModel(
        path=path,
        label=label,
        context_tokens=value(f"{value('general.architecture')}.context_length"),
        chat_template=value("tokenizer.chat_template"),
        run_folder=run,
        run=read_record(run) if run else None,
    )
