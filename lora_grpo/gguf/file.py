"""Open a GGUF file for its tensors. The file is complete or absent."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import atomic


@contextlib.contextmanager
def new_gguf(writer: Any, output: Path, num_bytes: int) -> Iterator[None]:
    """Write the metadata of a `gguf.GGUFWriter`; the block writes its tensors, in the order of their infos.

    Args:
        num_bytes: the size of the tensors.

    Raises:
        UserError: a number does not fit the format, or the folder cannot be written.
        DiskFullError: the disk is full.
    """
    with atomic.write_errors(output.parent), atomic.new_file(output, num_bytes) as temporary:
        try:
            writer.write_header_to_file(temporary)
            try:
                writer.write_kv_data_to_file()
            except (struct.error, ValueError, TypeError) as error:
                where = "config.json or generation_config.json"
                raise UserError(f"a number in {where} does not fit GGUF: {first_line(error)}; correct it") from error
            writer.write_ti_data_to_file()
            yield
            writer.close()
        finally:
            with contextlib.suppress(OSError):  # the disk is still full, and an open file keeps its space
                writer.close()
