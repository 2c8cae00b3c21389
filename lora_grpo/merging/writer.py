"""Writes a merged model tensor by tensor, so that memory holds a block of one and a kill costs one shard.

The folder is made under a temporary name. A finished shard is flushed, renamed and entered in `finished.json` with its
SHA-256; run again, the merge checks those and goes on behind them. The folder gets its name when all of it is there.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError, UserError
from lora_grpo.files import INDEX, ITEM_SIZES, TORCH_DTYPES, StoredTensor, TensorWriter, atomic, row_blocks
from lora_grpo.merging.delta import Output
from lora_grpo.merging.fidelity import STORED, TORCH, Dtype
from lora_grpo.merging.mapping import Plan
from lora_grpo.merging.merged_tensors import MergedTensor, is_finite
from lora_grpo.progress import Progress

MAX_SHARD_BYTES = 5 * 10**9
"""Largest shard that is begun; transformers' own default was this for years, and every reader takes it."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_LEDGER = "finished.json"
_ROOM_BYTES = 64 * 2**20
"""Disk that is kept free besides: tokenizer, configuration, and what else writes meanwhile."""


@dataclass(frozen=True)
class Shard:
    """One output file."""

    name: str
    outputs: tuple[Output, ...]
    entries: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, safetensors dtype and shape of each tensor, in order."""
    dtype: Dtype

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * ITEM_SIZES.get(dtype, 1) for _, dtype, shape in self.entries)


def lay_out(plan: Plan, dtype: Dtype, max_shard_bytes: int = MAX_SHARD_BYTES) -> list[Shard]:
    """Sort the outputs into shards: a new one where the base begins a new file, or where one is full."""
    base_dtype = plan.base_dtype
    groups: list[list[Output]] = []
    size, last = 0, None
    for output in plan.outputs.values():
        path = getattr(output.base, "path", last)
        num_bytes = math.prod(output.shape) * ITEM_SIZES.get(_written_dtype(output, dtype, base_dtype), 1)
        if not groups or path != last or size + num_bytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size, last = size + num_bytes, path
    shards = []
    for place, group in enumerate(groups, 1):
        name = f"model-{place:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        entries = tuple((output.name, _written_dtype(output, dtype, base_dtype), output.shape) for output in group)
        shards.append(Shard(name, tuple(group), entries, dtype))
    return shards


def staging_folder(output: Path) -> Path:
    """Return where a merge is made before it gets its name."""
    return output.with_name(f".{output.name}.partial")


def check_disk(staging: Path, shards: Sequence[Shard]) -> None:
    """Refuse a merge that the disk does not hold.

    Raises:
        UserError: says how much is missing.
    """
    there = sum((staging / shard.name).stat().st_size for shard in shards if (staging / shard.name).is_file())
    needed = sum(shard.num_bytes for shard in shards) - there + _ROOM_BYTES
    where = next(folder for folder in (staging, *staging.parents) if folder.is_dir())
    free = shutil.disk_usage(where).free
    if needed > free:
        raise UserError(
            f"{where} has {free / 1e9:.1f} GB free and the merge needs {needed / 1e9:.1f} GB; make room, or give an "
            "--output on another disk"
        )


def write_shards(staging: Path, shards: Sequence[Shard], identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Write every shard that is not there yet.

    Args:
        staging: the folder, held by this process; what another merge left in it is deleted.
        shards: from `lay_out`.
        identity: what makes two merges the same, bit for bit.

    Returns:
        Name, size in bytes and SHA-256 of each shard.

    Raises:
        RunError: a tensor came out as NaN or infinite.
    """
    finished = _finished(staging, identity)
    progress = Progress(len(shards), "merge")
    try:
        for done, shard in enumerate(shards):
            known = finished.get(shard.name)
            if not known or not _is_whole(staging / shard.name, known):
                progress.show(done, f"writing {shard.name}")
                with _full_disk(staging):
                    digest = _write(staging / shard.name, shard)
                finished[shard.name] = {"bytes": (staging / shard.name).stat().st_size, "sha256": digest}
                atomic.write_json(staging / _LEDGER, {"identity": identity, "shards": finished})
        progress.show(len(shards), "written")
    finally:
        progress.close()
    return [{"file": shard.name, **finished[shard.name]} for shard in shards]


@contextlib.contextmanager
def _full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"the disk of {folder} is full; make room, and the same command goes on") from None


def write_index(staging: Path, shards: Sequence[Shard]) -> None:
    """Write the index that says which shard holds which tensor; a single file needs none."""
    if len(shards) > 1:
        where = {name: shard.name for shard in shards for name, _, _ in shard.entries}
        total = sum(shard.num_bytes for shard in shards)
        parameters = sum(math.prod(shape) for shard in shards for _, _, shape in shard.entries)
        metadata = {"total_parameters": parameters, "total_size": total}
        atomic.write_json(staging / INDEX, {"metadata": metadata, "weight_map": dict(sorted(where.items()))})


def write_config(staging: Path, plan: Plan, dtype: Dtype) -> None:
    """Write the base's config.json with what the merge changed: dtype, quantisation, head, size of the vocabulary."""
    merged = copy.deepcopy(dict(plan.config))
    merged.pop("quantization_config", None)
    for inner in (merged, merged.get("text_config")):
        if not isinstance(inner, dict):
            continue
        for key in ("dtype", "torch_dtype"):
            if key in inner or (key == "dtype" and inner is merged and "torch_dtype" not in inner):
                inner[key] = TORCH[dtype]
        if plan.vocab_size is not None and ("vocab_size" in inner or inner is merged):
            inner["vocab_size"] = plan.vocab_size
        if plan.tie_word_embeddings is not None and ("tie_word_embeddings" in inner or inner is merged):
            inner["tie_word_embeddings"] = plan.tie_word_embeddings
    atomic.write_json(staging / "config.json", merged)


def publish(staging: Path, output: Path) -> None:
    """Give the finished folder its name. The ledger goes last: without it, finished shards would be written again."""
    for path in staging.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    with contextlib.suppress(FileNotFoundError):
        output.rmdir()  # an empty folder may be given; one that holds something was refused before
    staging.rename(output)
    atomic.sync(output.parent)
    tidy(output)


def tidy(output: Path) -> None:
    """Delete what only the making of a published folder needed; a kill may have left it."""
    for name in (_LEDGER, ".lock"):
        if (output / name).exists():
            (output / name).unlink()


def _written_dtype(output: Output, dtype: Dtype, base_dtype: str) -> str:
    """Weights take the dtype of the merge; counters, masks and single numbers stay as they are.

    So does a weight that the base keeps in float32 among 16-bit ones and the adapter leaves alone: it needs it.
    """
    stays = not output.changed and output.origin.dtype == "F32" and base_dtype != "F32"
    return output.origin.dtype if stays or not output.shape or output.origin.dtype not in _FLOATS else STORED[dtype]


def _finished(staging: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shards that an earlier process finished of this very merge, and delete everything else."""
    ledger = staging / _LEDGER
    shards: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(ledger.read_text(encoding="utf-8"))
        if found["identity"] == json.loads(json.dumps(identity)):
            shards = dict(found["shards"])
    for path in staging.iterdir():
        if path.name not in {*shards, _LEDGER, ".lock"}:
            path.unlink()
    return shards


def _is_whole(path: Path, known: Mapping[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == known["bytes"] and atomic.sha256(path) == known["sha256"]


def _write(path: Path, shard: Shard) -> str:
    import torch

    writer = TensorWriter(path, shard.entries)
    for output, (_, dtype, _) in zip(shard.outputs, shard.entries, strict=True):
        # A tensor that stays as it is passes as it is; everything else is computed in float32 and rounded once.
        same = not output.changed and output.origin.dtype == dtype and isinstance(output.origin, StoredTensor)
        if not output.shape:
            writer.write(output.origin.read())
            continue
        tensor = None if same else MergedTensor(output)
        for start, stop in row_blocks(output.shape):
            rows = output.origin.rows(start, stop) if tensor is None else tensor.rows(start, stop)
            if dtype in STORED.values():
                rows = rows.to(getattr(torch, TORCH_DTYPES[dtype]))
                if rows.numel() and not is_finite(rows):
                    raise RunError(
                        f"{output.name} is NaN or infinite in {shard.dtype}; its base or adapter is broken, or too "
                        "large for this dtype"
                    )
            writer.write(rows)
    return writer.finish()
