"""Write a merged model block by block, so that memory use is low and a killed merge loses at most one shard.

The model is written to a staging folder. Each finished shard is renamed and recorded in `finished.json` with its
SHA-256. If the merge is run again, it verifies the finished shards and continues. The folder is renamed when it is
complete and on disk.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.files import DTYPES, INDEX, ITEM_SIZES, TensorWriter, atomic, disk, json_files, row_blocks
from lora_grpo.merging.fidelity import STORED
from lora_grpo.merging.mapping import Plan
from lora_grpo.merging.outputs import Output
from lora_grpo.merging.report import Dtype
from lora_grpo.progress import Progress

_LEDGER = "finished.json"
_TEMPORARY = (_LEDGER, ".lock")
"""Files of the staging folder that are not part of the model."""
_RESERVED_BYTES = 64 * 2**20
"""Disk space reserved for the tokenizer, the configuration, and other processes."""


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
    own = output.origin.dtype
    is_precise = not output.changed and own == "F32" and base_dtype != "F32"
    return own if is_precise or not output.shape else STORED[dtype]


def staging_folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.partial")


def check_disk(staging: Path, shards: Sequence[Shard]) -> None:
    """Raise a UserError if the disk does not have enough space for the shards that do not exist yet."""
    existing = sum((staging / shard.name).stat().st_size for shard in shards if (staging / shard.name).is_file())
    disk.check_free_space(staging, sum(shard.num_bytes for shard in shards) - existing + _RESERVED_BYTES)


def write_shards(staging: Path, shards: Sequence[Shard], identity: Mapping[str, str]) -> dict[str, str]:
    """Write the shards that are not finished yet, and return the SHA-256 of each.

    Files of merges with another `identity` are deleted.

    Raises:
        RunError: a merged weight is NaN or infinite, or the disk is full.
    """
    ledger = json_files.read_object(staging / _LEDGER) if (staging / _LEDGER).is_file() else {}
    finished: dict[str, str] = ledger["sha256"] if ledger.get("identity") == identity else {}
    for path in staging.iterdir():
        if path.name not in {*finished, *_TEMPORARY}:
            path.unlink()
    progress = Progress(len(shards), "merge")
    try:
        for done, shard in enumerate(shards):
            path = staging / shard.name
            if shard.name not in finished or not path.is_file() or atomic.sha256(path) != finished[shard.name]:
                progress.show(done, f"writing {shard.name}")
                with disk.writing(path):
                    finished[shard.name] = _write(path, shard)
                atomic.write_json(staging / _LEDGER, {"identity": identity, "sha256": finished})
        progress.show(len(shards), "written")
    finally:
        progress.close()
    return finished


def _write(path: Path, shard: Shard) -> str:
    entries = [(output.name, dtype, output.shape) for output, dtype in shard.tensors]
    # A block is written in another thread (and hashed in a third one) while the next one is computed.
    with TensorWriter(path, entries) as writer, ThreadPoolExecutor(1) as thread:
        pending = None
        for output, dtype in shard.tensors:
            for rows in _blocks(output, dtype):
                if pending:
                    pending.result()
                pending = thread.submit(writer.write, rows)
        if pending:
            pending.result()
        return writer.finish()


def _blocks(output: Output, dtype: str) -> Iterator[Any]:
    """Yield a tensor in blocks of rows. Changed tensors are computed in float32 and rounded once."""
    import torch

    source = output if output.changed else output.origin
    if not output.shape:
        yield output.origin.read()
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


def write_index(staging: Path, shards: Sequence[Shard]) -> None:
    """Write the index that maps tensors to shards. A single file does not need one."""
    if len(shards) > 1:
        file_of = {output.name: shard.name for shard in shards for output, _ in shard.tensors}
        metadata = {"total_size": sum(shard.num_bytes for shard in shards)}
        atomic.write_json(staging / INDEX, {"metadata": metadata, "weight_map": dict(sorted(file_of.items()))})


def write_config(staging: Path, base: Path, plan: Plan, dtype: Dtype) -> None:
    """Write config.json: the base's, with the merged dtype, head, and vocabulary size."""
    config = json_files.read_object(base / "config.json")
    changes = {
        "vocab_size": plan.vocab_size,
        "tie_word_embeddings": plan.tie_word_embeddings,
        "dtype": DTYPES[STORED[dtype]],
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    text = config.get("text_config", {})
    for part in (config, text):
        part.pop("torch_dtype", None)  # the former name of `dtype`
    text |= {key: value for key, value in changes.items() if key in text}
    atomic.write_json(staging / "config.json", config | changes)


def publish(staging: Path, output: Path, shards: Mapping[str, str], synced: Sequence[Future[None]] = ()) -> None:
    """Flush all files to disk, and rename the folder. Its manifest has the SHA-256 of each file.

    `shards` is the result of `write_shards`. `synced` are flushes in other threads: an error is reported only once.
    """
    # Until the folder is renamed, the lock excludes other merges, and a merge after a kill needs the ledger.
    names = sorted({path.name for path in staging.iterdir()} - {*_TEMPORARY})
    others = {name: atomic.sha256(staging / name) for name in names if name not in shards}
    atomic.write_json(staging / atomic.MANIFEST, {"sha256": {**shards, **others}})
    for flush in synced:
        flush.result()
    for name in (*names, atomic.MANIFEST):
        atomic.sync(staging / name)
    with contextlib.suppress(FileNotFoundError):
        output.rmdir()  # an empty folder is accepted; others were rejected earlier
    staging.rename(output)
    atomic.sync(output.parent)
    tidy(output)


def tidy(output: Path) -> None:
    """Delete the temporary files of a published folder, which a killed process may have left there, if possible."""
    for name in _TEMPORARY:
        with contextlib.suppress(OSError):  # they do no harm, for example on a read-only disk
            (output / name).unlink()
