"""The header of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line


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


def value_of(header: Any, name: str) -> Any:
    """Return a value of a header, or None if it has no such name."""
    field = header.get_field(name)
    return field.contents() if field else None
