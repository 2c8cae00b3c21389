"""Read and write safetensors files in blocks of rows, so that a model does not have to fit in memory.

A file has three parts: the header length in eight bytes, a JSON header (names, dtypes, shapes, offsets), and the data.
Source: https://github.com/huggingface/safetensors#format.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import json_files

INDEX = "model.safetensors.index.json"
"""File of a model with several shards: the shard of each tensor."""
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Map the safetensors names of the dtypes of unquantized weights to the torch names."""
ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of these dtypes."""
BLOCK_ELEMENTS = 2**20
"""Elements to process at a time: 4 MiB in float32, which fits in a CPU cache."""
_LENGTH_BYTES = 8
"""Size of the number at the start of a file, which is the length of its header."""


class Rows(Protocol):
    """A tensor that can be read in blocks of rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> Any:
        """Return entries `start` to `stop` of the first dimension, as a torch tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk."""

    name: str
    dtype: str
    """The safetensors name, such as `BF16`."""
    shape: tuple[int, ...]
    path: Path
    """The file that contains it."""
    start: int
    """Where its data starts in the file, in bytes."""

    def read(self) -> Any:
        """Return the tensor as a torch tensor."""
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            return file.get_tensor(self.name)

    def rows(self, start: int, stop: int) -> Any:
        """Return entries `start` to `stop` of the first dimension. The dtype must be one of DTYPES.

        They are read, not mapped, because mapped pages count toward the memory of this process. safetensors parses the
        header at each opening, which takes as long as reading a block.
        """
        import torch

        row_shape = self.shape[1:]
        rows = torch.empty((stop - start, *row_shape), dtype=getattr(torch, DTYPES[self.dtype]))
        data = rows.view(-1).view(torch.uint8).numpy()  # the memory of `rows`, as bytes
        row_bytes = math.prod(row_shape) * ITEM_SIZES[self.dtype]
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + start * row_bytes)
            num_read = file.readinto(data)
        if num_read != len(data):
            raise UserError(f"{self.path} ends in {self.name}: read {num_read} bytes, expected {len(data)}")
        return rows


def row_blocks(shape: tuple[int, ...], elements: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows. Each range has at most `elements` elements (default: BLOCK_ELEMENTS) or is one row."""
    num_rows = shape[0]
    row_elements = max(1, math.prod(shape[1:]))
    block_rows = max(1, (elements or BLOCK_ELEMENTS) // row_elements)
    for start in range(0, num_rows, block_rows):
        yield start, min(start + block_rows, num_rows)


def main_dtype(tensors: Iterable[StoredTensor]) -> str:
    """Return the safetensors dtype name of most parameters."""
    parameters: Counter[str] = Counter()
    for tensor in tensors:
        parameters[tensor.dtype] += math.prod(tensor.shape)
    return parameters.most_common(1)[0][0]


def same_values(first: Rows, second: Rows) -> bool:
    """Return whether two tensors have the same shape and values. Both are read in blocks."""
    if first.shape != second.shape:
        return False
    for start, stop in row_blocks(first.shape):
        is_equal = first.rows(start, stop).float() == second.rows(start, stop).float()
        if not is_equal.all():
            return False
    return True


def file_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, without data, in file order. An incomplete file raises UserError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:  # also checks the header, and that no data is missing
            names = file.offset_keys()
        with path.open("rb") as raw_file:
            header_bytes = int.from_bytes(raw_file.read(_LENGTH_BYTES), "little")
            header = json.loads(raw_file.read(header_bytes))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is not a complete safetensors file ({first_line(error)})") from None

    data_start = _LENGTH_BYTES + header_bytes
    tensors = {}
    for name in names:
        entry = header[name]
        start = data_start + entry["data_offsets"][0]
        tensors[name] = StoredTensor(name, entry["dtype"], tuple(entry["shape"]), path, start)
    return tensors


def unquantized(tensors: dict[str, StoredTensor], source: Path, fix: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file or folder, or raise a UserError that ends with `fix` if some are not in DTYPES."""
    for tensor in tensors.values():
        if tensor.dtype not in DTYPES:
            raise UserError(f"{source} is quantized ({tensor.name} is {tensor.dtype}, not {', '.join(DTYPES)}); {fix}")
    return tensors


def model_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model, file by file in the order on disk.

    The source is `model.safetensors` if it exists, otherwise the index, otherwise every safetensors file.

    Raises:
        UserError: a shard or tensor listed in the index is missing, or there are no safetensors files.
    """
    index = folder / INDEX
    single_file = folder / "model.safetensors"
    shard_of: Any = {}  # by name of the tensor
    if single_file.is_file():  # transformers also prefers the single file
        paths = [single_file]
    elif index.is_file():
        shard_of = json_files.read_object(index).get("weight_map", {})
        paths = [folder / shard for shard in sorted(set(shard_of.values()))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder} has no .safetensors weights; other formats, such as pickled .bin, are not read")

    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        tensors |= file_tensors(path)
    missing = sorted(shard_of.keys() - tensors.keys())
    if missing:
        raise UserError(f"{folder} has no {missing[0]}, which {INDEX} lists; download or copy it again")
    return tensors


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write to a file."""

    name: str
    dtype: str
    """The safetensors name, a key of DTYPES."""
    shape: tuple[int, ...]


def write_tensors(path: Path, entries: Sequence[TensorEntry], blocks: Iterable[Any]) -> None:
    """Write a safetensors file incrementally.

    Args:
        path: the file.
        entries: the tensors, in write order.
        blocks: torch tensors with the elements of these tensors, in the same order. Each block is written in another
            thread while the next one is computed.
    """
    import torch

    # The header, with the bytes of each tensor in the data.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data_bytes = 0
    for entry in entries:
        start = data_bytes
        data_bytes += math.prod(entry.shape) * ITEM_SIZES[entry.dtype]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, data_bytes]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data must be 8-byte aligned
    prefix = len(text).to_bytes(_LENGTH_BYTES, "little") + text

    with path.open("wb") as file, ThreadPoolExecutor(1) as thread:
        pending = thread.submit(file.write, prefix)
        for block in blocks:
            pending.result()  # at most two blocks are in memory: one is written while the next is computed
            data = block.contiguous().reshape(-1).view(torch.uint8).numpy()
            pending = thread.submit(file.write, data)
        pending.result()
        expected_bytes = len(prefix) + data_bytes
        if file.tell() != expected_bytes:
            raise RuntimeError(f"{path} has {file.tell()} bytes, expected {expected_bytes}")
