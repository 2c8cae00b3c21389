"""Write a merged model block by block, so that memory use is low."""

import contextlib
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.files import DTYPES, INDEX, ITEM_SIZES, atomic, json_files, row_blocks, write_tensors
from lora_grpo.merging.fidelity import STORED
from lora_grpo.merging.mapping import MergePlan
from lora_grpo.merging.outputs import Output
from lora_grpo.merging.report import Dtype
from lora_grpo.models import base_model, model_files
from lora_grpo.progress import Progress


@dataclass(frozen=True)
class Shard:
    """One file of the merged model: each tensor with its safetensors dtype, in order."""

    name: str
    tensors: tuple[tuple[Output, str], ...]

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(output.shape) * ITEM_SIZES[dtype] for output, dtype in self.tensors)


def lay_out(plan: MergePlan, dtype: Dtype) -> list[Shard]:
    """Split the outputs into shards, one for each file of the base."""
    is_float32 = plan.base_dtype == "F32"
    groups: dict[Path, list[tuple[Output, str]]] = {}
    for output in plan.outputs.values():
        own = output.base.dtype
        # Scalars and unchanged float32 weights of a 16-bit base keep their dtype for precision.
        keeps = not output.shape or (own == "F32" and not is_float32 and not output.low_rank)
        groups.setdefault(output.base.path, []).append((output, own if keeps else STORED[dtype]))
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = ["model.safetensors"]
    return [Shard(name, tuple(tensors)) for name, tensors in zip(names, groups.values(), strict=True)]


def write_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the shards. Raises RunError if a merged weight is NaN or infinite."""
    with contextlib.closing(Progress(len(shards), "merge")) as progress:
        for done, shard in enumerate(shards):
            progress.show(done, f"writing {shard.name}")
            entries = [(output.base.name, dtype, output.shape) for output, dtype in shard.tensors]
            blocks = (block for output, dtype in shard.tensors for block in _blocks(output, dtype))
            write_tensors(folder / shard.name, entries, blocks)
        progress.show(len(shards), "written")


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
            raise RunError(f"{output.name} is NaN or infinite in {dtype}: broken, or too large for this dtype")
        yield rows


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index that maps tensors to shards. A single file does not need one."""
    if len(shards) > 1:
        file_of = {output.base.name: shard.name for shard in shards for output, _ in shard.tensors}
        metadata = {"total_size": sum(shard.num_bytes for shard in shards)}
        atomic.write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(file_of.items()))})


def write_config(folder: Path, base: Path, plan: MergePlan, dtype: Dtype) -> None:
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


def write_generation_config(folder: Path, base: Path, config: Any, ends: Sequence[int], pad: int | None) -> None:
    """Write generation_config.json: the base's, with all tokens that end a completion, and a padding token.

    The file is the base's to the byte if it has both, and absent if the base has none and config.json implies them.
    The base's sampling defaults, such as a temperature, stay.

    Args:
        config: the base's configuration.
        ends: ids of the tokens that end a completion; empty if unknown, which changes nothing.
        pad: id of the tokenizer's padding token, written if the base names none.
    """
    from transformers import GenerationConfig

    path = base / model_files.GENERATION_CONFIG
    if path.is_file():
        settings = json_files.read_object(path)
    else:
        settings = GenerationConfig.from_model_config(config).to_diff_dict()
    changes: dict[str, Any] = {}
    declared = settings.get("eos_token_id")
    declared_ids = declared if isinstance(declared, list) else [declared]
    if ends and set(ends) != set(declared_ids):
        changes["eos_token_id"] = list(ends) if len(ends) > 1 else ends[0]
    has_pad = settings.get("pad_token_id") not in (None, base_model.NO_PAD)
    if ends and pad is not None and not has_pad and (changes or path.is_file()):
        changes["pad_token_id"] = pad
    if changes:
        atomic.write_json(folder / model_files.GENERATION_CONFIG, settings | changes)
    elif path.is_file():
        shutil.copyfile(path, folder / model_files.GENERATION_CONFIG)
