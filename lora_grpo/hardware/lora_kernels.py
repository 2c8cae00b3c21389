"""Tables with which vLLM launches its LoRA kernels: measured ones, and one that always adds in the same order.

vLLM reads them from a folder that an environment variable names (`vllm/lora/ops/triton_ops/utils.py`, in 0.27 to 0.33).
They are about the kernel that multiplies a layer's input x with A of the adapter, which "shrinks" it to the rank:

    y = x A^T, x (batch, width), A (rank, width)

For the few tokens of decoding, there are too few outputs to occupy a GPU. So the kernel splits the sum over the width
into `split_k` parts, which thread blocks compute at the same time and add to y by atomic operations. Their order
changes from call to call, and with it the rounding. With one part, there is nothing to add.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_grpo.files import atomic
from lora_grpo.hardware.measured_engine import measured_engine_file

FOLDER_VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
"""The variable that names the folder of tables."""
_TABLE_LORAS = "2"
"""vLLM's key of tables for engines with one adapter: it counts "no adapter" as another one."""
_MAX_SLICES = 8
"""A table needs an entry for each number of layers that vLLM computes at once (3 for query, key and value). It fails
otherwise; no model in 0.33 has more than 8."""
_SMALL_BATCH = 64
_LARGE_BATCH = 128
"""From this number of tokens on, vLLM's default is another. It takes the entry with the nearest number."""
_ANY_SIZE = 1
"""A width or rank that stands for all of them, because it is the only entry."""


@dataclass(frozen=True)
class ShrinkShape:
    """The sizes of a call of the kernel."""

    slices: int
    """Layers with the same input that are computed at once, e.g. 3 for query, key and value."""
    batch: int
    """Tokens."""
    width: int
    rank: int


@dataclass(frozen=True)
class ShrinkKernel:
    """How the kernel is launched."""

    block_k: int
    """Inputs that a thread block multiplies at once."""
    split_k: int
    """Parts of the sum over the width. 1 is the reproducible order."""
    block_m: int = 32
    """Tokens of a thread block."""
    block_n: int = 16
    """Ranks of a thread block."""
    num_warps: int = 4
    num_stages: int = 2

    def entry(self) -> dict[str, Any]:
        """Return the entry of vLLM's table."""
        return {**asdict(self), "num_ctas": 1, "group_size_m": 8, "max_nreg": None}


def vllm_default(batch: int) -> ShrinkKernel:
    """Return how vLLM (0.27 to 0.33) launches the kernel without a table."""
    if batch < _LARGE_BATCH:
        return ShrinkKernel(block_k=256, split_k=64)
    return ShrinkKernel(block_k=32, split_k=8)


def in_one_part(batch: int) -> ShrinkKernel:
    """Return the same with the sum over the width in one part, which has a reproducible order."""
    return ShrinkKernel(block_k=vllm_default(batch).block_k, split_k=1)


def save_tuned(gpu: str, kernels: Mapping[ShrinkShape, ShrinkKernel]) -> Path:
    """Save the table that runs on GPUs with this name use from now on, and return its file.

    Args:
        gpu: the name that torch has for the GPU.
        kernels: the fastest kernel of each shape.
    """
    return _write(_tuned_folder(), gpu, kernels)


def save_reproducible(folder: Path, gpu: str) -> Path:
    """Write a table that has no sum in parts, and return its file."""
    return _write(folder, gpu, {}, others=in_one_part)


def use_tables(gpu: str, *, reproducible: bool) -> None:
    """Have vLLM use a table in this process. Call it before an engine is started.

    Args:
        gpu: the name that torch has for the GPU.
        reproducible: use the table without sums in parts. By default, what `check-gpu` measured on such a GPU, if it
            did, unless the user has chosen a folder.
    """
    if reproducible:
        folder = _tables() / "reproducible"
        save_reproducible(folder, gpu)
        os.environ[FOLDER_VARIABLE] = str(folder)
    elif (_tuned_folder() / _file_name(gpu)).exists():
        os.environ.setdefault(FOLDER_VARIABLE, str(_tuned_folder()))


def _tables() -> Path:
    return measured_engine_file().parent / "lora-kernels"


def _tuned_folder() -> Path:
    return _tables() / "tuned"


def _file_name(gpu: str) -> str:
    return f"{gpu.replace(' ', '_').replace('-', '_')}_SHRINK.json"


def _write(
    folder: Path,
    gpu: str,
    kernels: Mapping[ShrinkShape, ShrinkKernel],
    others: Callable[[int], ShrinkKernel] = vllm_default,
) -> Path:
    """Write a table for `kernels`, and for all other batch sizes with what `others` returns for them.

    vLLM takes the entry with the nearest sizes: slices (exactly), batch, width, rank.
    """
    by_slices: dict[str, Any] = {}
    for slices in range(1, _MAX_SLICES + 1):
        by_batch: dict[str, Any] = {}
        for batch in (_SMALL_BATCH, _LARGE_BATCH):
            by_batch[str(batch)] = {str(_ANY_SIZE): {str(_ANY_SIZE): others(batch).entry()}}
        measured = [shape for shape in kernels if shape.slices == slices]
        for batch in {shape.batch for shape in measured}:
            by_batch[str(batch)] = {}
        for shape in measured:
            by_width = by_batch[str(shape.batch)]
            by_width.setdefault(str(shape.width), {})[str(shape.rank)] = kernels[shape].entry()
        by_slices[str(slices)] = by_batch

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _file_name(gpu)
    atomic.write_json(path, {_TABLE_LORAS: by_slices})
    return path
