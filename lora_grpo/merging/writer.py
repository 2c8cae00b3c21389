"""Write a merged model block by block, so that memory use is low."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.files import DTYPES, INDEX, ITEM_SIZES, atomic, json_files, row_blocks, write_tensors
from lora_grpo.merging.fidelity import STORED
from lora_grpo.merging.mapping import Plan
from lora_grpo.merging.outputs import Output
from lora_grpo.merging.report import Dtype
from lora_grpo.progress import Progress


@dataclass(frozen=True)
class Shard:
    """One file of the merged model: each tensor with its safetensors dtype, in order."""

    name: str
    tensors: tuple[tuple[Output, str], ...]

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(output.shape) * ITEM_SIZES[dtype] for output, dtype in self.tensors)


def lay_out(plan: Plan, dtype: Dtype) -> list[Shard]:
    """Split the outputs into shards, one for each file of the base."""
    base_dtype = plan.base_dtype
    groups: dict[Path, list[tuple[Output, str]]] = {}
    for output in plan.outputs.values():
        groups.setdefault(output.base.path, []).append((output, _written_dtype(output, dtype, base_dtype)))
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = ["model.safetensors"]
    return [Shard(name, tuple(tensors)) for name, tensors in zip(names, groups.values(), strict=True)]


def _written_dtype(output: Output, dtype: Dtype, base_dtype: str) -> str:
    """Return the dtype to write. Scalars and unchanged float32 weights of a 16-bit base keep theirs for precision."""
    own = output.base.dtype
    is_precise = not output.low_rank and own == "F32" and base_dtype != "F32"
    return own if is_precise or not output.shape else STORED[dtype]


def write_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the shards. Raises RunError if a merged weight is NaN or infinite."""
    progress = Progress(len(shards), "merge")
    try:
        for done, shard in enumerate(shards):
            progress.show(done, f"writing {shard.name}")
            entries = [(output.base.name, dtype, output.shape) for output, dtype in shard.tensors]
            blocks = (block for output, dtype in shard.tensors for block in _blocks(output, dtype))
            write_tensors(folder / shard.name, entries, blocks)
        progress.show(len(shards), "written")
    finally:
        progress.close()


def _blocks(output: Output, dtype: str) -> Iterator[Any]:
    """Yield a tensor in blocks of rows. Changed tensors are computed in float32 and rounded once."""
    import torch

    source = output if output.low_rank else output.base
    if not output.shape:
        yield output.base.read()
        return
    for start, stop in row_blocks(output.shape):
        rows = source.rows(start, stop).to(getattr(torch, DTYPES[dtype]))
        low, high = rows.aminmax()
        if not (low.isfinite() and high.isfinite()):  # faster than testing each element
            raise RunError(
                f"{output.name} is NaN or infinite in {dtype}; its base or adapter is broken, or too large for this "
                "dtype"
            )
        yield rows


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index that maps tensors to shards. A single file does not need one."""
    if len(shards) > 1:
        file_of = {output.base.name: shard.name for shard in shards for output, _ in shard.tensors}
        metadata = {"total_size": sum(shard.num_bytes for shard in shards)}
        atomic.write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(file_of.items()))})


def write_config(folder: Path, base: Path, plan: Plan, dtype: Dtype) -> None:
    """Write config.json: the base's, with the merged dtype and head."""
    config = json_files.read_object(base / "config.json")
    changes: dict[str, Any] = {"dtype": DTYPES[STORED[dtype]]}
    if plan.tie_word_embeddings is not None:
        changes["tie_word_embeddings"] = plan.tie_word_embeddings
    text = config.get("text_config", {})
    for part in (config, text):
        part.pop("torch_dtype", None)  # the former name of `dtype`
    text |= {key: value for key, value in changes.items() if key in text}
    atomic.write_json(folder / "config.json", config | changes)
