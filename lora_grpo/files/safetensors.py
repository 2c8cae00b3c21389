"""Safetensors files, read and written a piece of a tensor at a time, so that memory never holds a model.

The format: eight bytes of length, a JSON header of that length (names, dtypes, shapes, offsets), then the bytes of the
tensors one after the other. Source: https://github.com/huggingface/safetensors#format. Files are read, not mapped: a
mapped page counts as memory of the process for as long as the kernel keeps it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lora_grpo.errors import UserError, first_line

INDEX = "model.safetensors.index.json"
TORCH_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""What safetensors calls a dtype, and what torch does."""
SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Bytes of an element; those that are not here have one."""


@dataclass(frozen=True)
class Stored:
    """A tensor where it lies on disk."""

    name: str
    dtype: str
    """Safetensors' name of it, such as `BF16`."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    """Where its bytes begin in the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * SIZES.get(self.dtype, 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension; of a scalar, its own."""
        return self.num_bytes // self.shape[0] if self.shape and self.shape[0] else self.num_bytes

    def read(self) -> Any:
        """Return the whole tensor."""
        return self.rows(0, self.shape[0]) if self.shape else self._read(0, self.num_bytes, ())

    def rows(self, start: int, stop: int) -> Any:
        """Return entries `start` to `stop` of the first dimension, as a tensor."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"{self.name} has {self.shape[0]} rows; {start} to {stop} were asked for")
        return self._read(start * self.row_bytes, stop * self.row_bytes, (stop - start, *self.shape[1:]))

    def blocks(self, max_bytes: int) -> Iterator[tuple[int, int]]:
        """Cut the first dimension into ranges of at most `max_bytes` on disk, and of at least one entry."""
        step = max(1, max_bytes // max(1, self.row_bytes))
        for start in range(0, self.shape[0], step):
            yield start, min(start + step, self.shape[0])

    def raw(self, max_bytes: int) -> Iterator[memoryview]:
        """Return the bytes, in pieces; each is overwritten by the next."""
        buffer = memoryview(bytearray(min(max_bytes, self.num_bytes)))
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            left = self.num_bytes
            while left:
                piece = buffer[: min(left, len(buffer))]
                _fill(file, piece, self)
                yield piece
                left -= len(piece)

    def _read(self, start: int, stop: int, shape: tuple[int, ...]) -> Any:
        import torch

        tensor = torch.empty(shape, dtype=getattr(torch, TORCH_DTYPES[self.dtype]))
        if stop > start:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + start)
                _fill(file, memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), self)
        return tensor


def _fill(file: IO[bytes], buffer: memoryview, tensor: Stored) -> None:
    filled = 0
    while filled < len(buffer):
        got = file.readinto(buffer[filled:])  # type: ignore[attr-defined]
        if not got:
            raise UserError(f"{tensor.path} ends in the middle of {tensor.name}; download or copy it again")
        filled += got


def file_tensors(path: Path) -> dict[str, Stored]:
    """Return the tensors of one safetensors file, in the order of their bytes.

    Raises:
        UserError: it is not a whole safetensors file, or has a dtype that is not known here.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                raise ValueError("header longer than the file")
            entries = json.loads(file.read(length))
        begin = 8 + length
        found = [
            (entry["data_offsets"], Stored(name, entry["dtype"], tuple(entry["shape"]), path, begin))
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
        found.sort(key=lambda item: (item[0], item[1].name))
        tensors = {}
        for (start, stop), tensor in found:
            if tensor.dtype not in TORCH_DTYPES:
                raise ValueError(f"{tensor.name} has the dtype {tensor.dtype}")
            if stop - start != tensor.num_bytes or begin + stop > size:
                raise ValueError(f"{tensor.name} has {max(0, min(stop, size - begin) - start)} of its bytes")
            tensors[tensor.name] = Stored(tensor.name, tensor.dtype, tensor.shape, path, begin + start)
        return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = first_line(error)
        raise UserError(f"{path} is not a whole safetensors file ({reason})") from None


def model_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a model's folder: those of `model.safetensors`, of its index, or of all its files.

    They come in the order they lie on disk, file by file.

    Raises:
        UserError: a shard or a tensor of the index is missing, or there are no safetensors.
    """
    index = folder / INDEX
    single = folder / "model.safetensors"
    if index.is_file() and not single.is_file():  # of both, transformers reads the single file
        try:
            where = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            if not all(isinstance(name, str) for name in where.values()):
                raise ValueError("a tensor's file is no name")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{index} cannot be read ({error})") from None
        files = {name: folder / name for name in sorted(set(where.values()))}
        missing = [name for name, path in files.items() if not path.is_file()]
        if missing:
            raise UserError(f"{folder} lacks {', '.join(missing[:3])} of its index; download or copy it again")
        held = {name: file_tensors(path) for name, path in files.items()}
        lost = [tensor for tensor, name in where.items() if tensor not in held[name]]
        if lost:
            raise UserError(f"{folder / where[lost[0]]} lacks {lost[0]}, which {INDEX} says it holds")
        return {tensor: stored for name in files for tensor, stored in held[name].items() if where.get(tensor) == name}
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        reason = f"; {pickled[0]} is pickled, and reading a pickle runs whatever is in it" if pickled else ""
        raise UserError(f"{folder} holds no .safetensors weights{reason}")
    return {name: tensor for path in paths for name, tensor in file_tensors(path).items()}


class Writer:
    """One safetensors file, written in the order of its header under a temporary name, and renamed when it is whole."""

    def __init__(self, path: Path, entries: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        """Begin the file.

        Args:
            path: of the finished file.
            entries: name, safetensors dtype and shape of each tensor, in the order they will be written.
        """
        self._path = path
        self._temporary = path.with_name(f".{path.name}.partial")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, dtype, shape in entries:
            start, end = end, end + math.prod(shape) * SIZES.get(dtype, 1)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of eight
        self._expected = 8 + len(text) + end
        self._written = 0
        self._digest = hashlib.sha256()
        self._file = self._temporary.open("wb", buffering=0)
        self.write(len(text).to_bytes(8, "little") + text)

    def write(self, data: Any) -> None:
        """Append bytes, or the elements of a tensor."""
        if not isinstance(data, bytes | memoryview):
            import torch

            data = memoryview(data.contiguous().reshape(-1).view(torch.uint8).numpy())
        self._digest.update(data)
        while len(data):
            done = self._file.write(data)
            self._written += done
            data = data[done:]

    def finish(self) -> str:
        """Flush the file to disk, rename it into place and return its SHA-256.

        Raises:
            RuntimeError: not all that the header promises was written.
        """
        if self._written != self._expected:
            raise RuntimeError(f"{self._path} has {self._written} of {self._expected} bytes")
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._path)
        return self._digest.hexdigest()
