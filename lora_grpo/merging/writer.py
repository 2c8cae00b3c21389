"""Write a merged model block by block, so that memory use is low."""

import contextlib
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.files import DTYPES, INDEX, ITEM_SIZES, TensorEntry, atomic, json_files, row_blocks, write_tensors
from lora_grpo.merging.fidelity import STORED
from lora_grpo.merging.mapping import MergePlan
from lora_grpo.merging.outputs import Output
from lora_grpo.merging.report import Dtype
from lora_grpo.models import model_files, stop_tokens
from lora_grpo.progress import Progress


@dataclass(frozen=True)
class ShardTensor:
    """A tensor of a shard."""

    output: Output
    dtype: str
    """The safetensors name of the dtype to write."""

    @property
    def name(self) -> str:
        """The name in the file, which is that in the base's file."""
        return self.output.base.name

    @property
    def num_bytes(self) -> int:
        return math.prod(self.output.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class Shard:
    """One file of the merged model, with its tensors in order."""

    name: str
    tensors: tuple[ShardTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the data, without the header."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def lay_out(plan: MergePlan, dtype: Dtype) -> list[Shard]:
    """Split the outputs into shards, one for each file of the base."""
    is_16_bit_base = plan.base_dtype != "F32"
    tensors_of_file: dict[Path, list[ShardTensor]] = {}
    for output in plan.outputs.values():
        base_dtype = output.base.dtype
        # Scalars and unchanged float32 weights of a 16-bit base keep their dtype for precision.
        is_unchanged_float32 = base_dtype == "F32" and not output.low_rank
        keeps_dtype = not output.shape or (is_16_bit_base and is_unchanged_float32)
        tensor = ShardTensor(output, base_dtype if keeps_dtype else STORED[dtype])
        tensors_of_file.setdefault(output.base.path, []).append(tensor)

    num_files = len(tensors_of_file)
    shards = []
    for number, tensors in enumerate(tensors_of_file.values(), 1):
        name = f"model-{number:05d}-of-{num_files:05d}.safetensors" if num_files > 1 else "model.safetensors"
        shards.append(Shard(name, tuple(tensors)))
    return shards


def write_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the shards. Raises RunError if a merged weight is NaN or infinite."""
    num_tensors = sum(len(shard.tensors) for shard in shards)
    with contextlib.closing(Progress(num_tensors, "merge")) as progress:
        num_written = 0
        for shard in shards:
            entries = [TensorEntry(tensor.name, tensor.dtype, tensor.output.shape) for tensor in shard.tensors]
            write_tensors(folder / shard.name, entries, _blocks_of(shard, progress, num_written))
            num_written += len(shard.tensors)


def _blocks_of(shard: Shard, progress: Progress, num_before: int) -> Iterator[Any]:
    """Yield the blocks of a shard's tensors, which are computed while they are written, and tell the progress.

    Args:
        num_before: the number of tensors in the shards before.
    """
    for number, tensor in enumerate(shard.tensors, num_before + 1):
        yield from _blocks(tensor)
        progress.show(number, shard.name)


def _blocks(tensor: ShardTensor) -> Iterator[Any]:
    """Yield a tensor in blocks of rows. Changed tensors are computed in float32 and rounded once."""
    import torch

    output = tensor.output
    if not output.shape:
        yield output.base.read()
        return
    source = output if output.low_rank else output.base
    torch_dtype = getattr(torch, DTYPES[tensor.dtype])
    for start, stop in row_blocks(output.shape):
        rows = source.rows(start, stop).to(torch_dtype)
        low, high = rows.aminmax()
        if not (low.isfinite() and high.isfinite()):  # faster than testing each element
            raise RunError(f"{output.name} is NaN or infinite in {tensor.dtype}: broken, or too large for this dtype")
        yield rows


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index that maps tensors to shards. A single file does not need one."""
    if len(shards) == 1:
        return
    file_of_tensor = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    metadata = {"total_size": sum(shard.num_bytes for shard in shards)}
    atomic.write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(file_of_tensor.items()))})


def write_config(folder: Path, base: Path, plan: MergePlan, dtype: Dtype) -> None:
    """Write config.json: the base's, with the merged dtype and head."""
    config = json_files.read_object(base / "config.json")
    changes: dict[str, Any] = {"dtype": DTYPES[STORED[dtype]]}
    if plan.tie_word_embeddings is not None:
        changes["tie_word_embeddings"] = plan.tie_word_embeddings

    # The part for text of a multimodal model repeats some settings. It is changed in place, within `config`.
    text_config = config.get("text_config", {})
    for settings in (config, text_config):
        settings.pop("torch_dtype", None)  # the former name of `dtype`
    for name, value in changes.items():
        if name in text_config:
            text_config[name] = value
    atomic.write_json(folder / "config.json", config | changes)


def write_generation_config(folder: Path, base: Path, config: Any, ends: Sequence[int], pad: int | None) -> None:
    """Write generation_config.json: the base's settings, all tokens that end a completion, and a padding token.

    If the base's file already has both, it is copied byte for byte. If the base has no such file and config.json
    implies the tokens that end a completion, none is written. The base's sampling defaults stay, such as a temperature.

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
    declared_ends = stop_tokens.as_ids(settings.get("eos_token_id"))
    if ends and set(ends) != set(declared_ends):
        changes["eos_token_id"] = list(ends) if len(ends) > 1 else ends[0]
    lacks_pad = settings.get("pad_token_id") in (None, stop_tokens.NO_PAD)
    writes_file = bool(changes) or path.is_file()  # a padding token alone is no reason for a new file
    if ends and pad is not None and lacks_pad and writes_file:
        changes["pad_token_id"] = pad
    if changes:
        atomic.write_json(folder / model_files.GENERATION_CONFIG, settings | changes)
    elif path.is_file():
        shutil.copyfile(path, folder / model_files.GENERATION_CONFIG)
