"""Read and write safetensors files in blocks of rows, so that a model does not have to fit in memory.

A file has three parts: the header length in eight bytes, a JSON header (names, dtypes, shapes, offsets), and the data.
Source: https://github.com/huggingface/safetensors#format.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import json_files

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Map the safetensors names of the dtypes of unquantized weights to the torch names."""
ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of these dtypes."""
BLOCK_ELEMENTS = 2**20
"""Elements to process at a time: 4 MiB in float32, which fits in a CPU cache."""


class Rows(Protocol):
    """A tensor that can be read in blocks of rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def rows(self, start: int, stop: int) -> Any: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk. `dtype` is the safetensors name, such as `BF16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    """Where its data starts in the file, in bytes."""

    def read(self) -> Any:
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            return file.get_tensor(self.name)

    def rows(self, start: int, stop: int) -> Any:
        """Return entries `start` to `stop` of the first dimension. The dtype must be one of DTYPES.

        They are read, not mapped, because mapped pages count toward the memory of this process. safetensors parses the
        header at each opening, which takes as long as reading a block.
        """
        import torch

        rows = torch.empty((stop - start, *self.shape[1:]), dtype=getattr(torch, DTYPES[self.dtype]))
        data = rows.view(-1).view(torch.uint8).numpy()
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + start * math.prod(self.shape[1:]) * ITEM_SIZES[self.dtype])
            if (size := file.readinto(data)) != len(data):
                raise UserError(f"{self.path} ends in {self.name}: read {size} bytes, expected {len(data)}")
        return rows


def row_blocks(shape: tuple[int, ...], elements: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows. Each range has at most `elements` elements (default: BLOCK_ELEMENTS) or is one row."""
    step = max(1, (elements or BLOCK_ELEMENTS) // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def same_values(first: Rows, second: Rows) -> bool:
    """Return whether two tensors have the same shape and values. Both are read in blocks."""
    return first.shape == second.shape and all(
        bool((first.rows(*rows).float() == second.rows(*rows).float()).all()) for rows in row_blocks(first.shape)
    )


def file_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, without data, in file order. An incomplete file raises UserError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            names = file.offset_keys()
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))  # safetensors has checked it
        parts = ((name, header[name]) for name in names)
        return {
            name: StoredTensor(name, part["dtype"], tuple(part["shape"]), path, 8 + length + part["data_offsets"][0])
            for name, part in parts
        }
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is not a complete safetensors file ({first_line(error)})") from None


def unquantized(tensors: dict[str, StoredTensor], source: Path, fix: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file or folder, or raise a UserError that ends with `fix` if some are not in DTYPES."""
    if odd := next((tensor for tensor in tensors.values() if tensor.dtype not in DTYPES), None):
        raise UserError(f"{source} is quantized ({odd.name} is {odd.dtype}, not {', '.join(DTYPES)}); {fix}")
    return tensors


def model_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model, file by file in the order on disk.

    The source is `model.safetensors` if it exists, otherwise the index, otherwise every safetensors file.

    Raises:
        UserError: a shard or tensor listed in the index is missing, or there are no safetensors files.
    """
    index, single = folder / INDEX, folder / "model.safetensors"
    file_of: Any = {}
    if single.is_file():  # transformers also prefers the single file
        paths = [single]
    elif index.is_file():
        file_of = json_files.read_object(index).get("weight_map", {})
        paths = [folder / file for file in sorted(set(file_of.values()))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder} has no .safetensors weights; other formats, such as pickled .bin, are not read")
    tensors = {name: tensor for path in paths for name, tensor in file_tensors(path).items()}
    if missing := sorted(file_of.keys() - tensors.keys()):
        raise UserError(f"{folder} has no {missing[0]}, which {INDEX} lists; download or copy it again")
    return tensors


def write_tensors(path: Path, entries: Sequence[tuple[str, str, tuple[int, ...]]], blocks: Iterable[Any]) -> None:
    """Write a safetensors file incrementally.

    Args:
        entries: name, safetensors dtype, and shape of each tensor, in write order.
        blocks: tensors with the elements of these tensors, in the same order. Each block is written in another thread
            while the next one is computed.
    """
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        start, end = end, end + math.prod(shape) * ITEM_SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data must be 8-byte aligned
    with path.open("wb") as file, ThreadPoolExecutor(1) as thread:
        pending = thread.submit(file.write, len(text).to_bytes(8, "little") + text)
        for block in blocks:
            pending.result()
            pending = thread.submit(file.write, block.contiguous().reshape(-1).view(torch.uint8).numpy())
        pending.result()
        if file.tell() != 8 + len(text) + end:
            raise RuntimeError(f"{path} has {file.tell()} bytes, expected {8 + len(text) + end}")
