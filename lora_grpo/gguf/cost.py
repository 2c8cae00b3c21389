"""Measure what each type of a GGUF file costs: the KL divergence from the model that it was made from.

KL(model || file) in nats per token over texts of the run, with the file's weights as they are dequantized and all else
in float32. llama.cpp also rounds the inputs of quantized weights, which is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import Rows, atomic
from lora_grpo.gguf.architecture import Tensor
from lora_grpo.gguf.types import interleaved
from lora_grpo.gguf.writer import SourceModel
from lora_grpo.merging import divergences_from, read_report, texts_of

REPORT = "gguf_report.json"
TEXTS = 8
"""Number of texts, with up to 64 tokens of an answer each."""


class ExportedFile(BaseModel):
    """One file of an export."""

    model_config = ConfigDict(frozen=True)

    type: str
    bytes: int
    kl: float | None = None
    """KL(model || file) in nats per token; None if it was not measured, or not yet when the export was killed."""
    texts: int = 0
    tokens: int = 0
    of_run: bool = False
    """Whether the texts are completions of the run, or plain text."""
    not_measured: str | None = None
    """The reason, if the divergence was not measured."""
    adapter_sha256: str | None = None
    """The adapter that was merged into the model, if that is known."""
    onto: str | None = None
    """The base of that merge: `full` or `dequantized`."""
    dtype: str | None = None
    """The dtype of the merged model."""


class _Report(BaseModel):
    """The contents of gguf_report.json."""

    files: dict[str, ExportedFile]
    """By name."""


@dataclass(frozen=True, eq=False)
class _Dequantized:
    """A tensor of a GGUF file with the rows in the order of transformers."""

    tensor: Any
    """A `gguf.ReaderTensor`."""
    places: Any
    """The row in the file of each row, or None if the order is the same."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self.tensor.shape))

    def rows(self, start: int, stop: int) -> Any:
        import torch
        from gguf.quants import dequantize

        chosen = slice(start, stop) if self.places is None else self.places[start:stop]
        return torch.from_numpy(dequantize(self.tensor.data[chosen], self.tensor.tensor_type).copy())


def measure_costs(model: SourceModel, outputs: Mapping[str, Path], run: Path | None) -> dict[str, ExportedFile]:
    """Measure the files of a model by type, and write gguf_report.json beside them. Return its files.

    The report keeps the entries of other files in that folder. `run` is the run that trained the model. The
    model's network cannot be used afterward.
    """
    beside, merge = next(iter(outputs.values())).parent, read_report(model.folder)
    files, source = exported_files(beside), dict[str, Any]()
    if merge:
        source = {"adapter_sha256": merge.identity.get("adapter_sha256"), "onto": merge.onto, "dtype": merge.dtype}
    for kind, output in outputs.items():
        files[output.name] = ExportedFile(type=kind, bytes=output.stat().st_size, **source)
    atomic.write_json(beside / REPORT, _Report(files=files).model_dump())  # in case that measuring is interrupted
    measured, texts, tokens, problem = dict[str, float](), 0, 0, None
    try:
        ids, keep = texts_of(model.tokenizer, run, TEXTS)
        reference = {tensor.source.name: tensor.source for tensor in model.tensors}
        others = {kind: _weights(path, model.tensors) for kind, path in outputs.items()}
        measured = divergences_from(reference, others, model.network, ids, keep)
        texts, tokens = len(ids), keep * len(ids)
    except Exception as error:  # noqa: BLE001 - models vary without limit, and a figure must not fail the export
        problem = ("" if isinstance(error, UserError) else f"{type(error).__name__}: ") + first_line(error)
    of_run = run is not None and any((run / "completions").glob("step-*.jsonl"))
    for kind, output in outputs.items():
        found = {
            "kl": max(0.0, round(measured[kind], 9)) if kind in measured else None,  # less is rounding
            "texts": texts,
            "tokens": tokens,
            "of_run": of_run,
            "not_measured": problem,
        }
        files[output.name] = files[output.name].model_copy(update=found)
    atomic.write_json(beside / REPORT, _Report(files=files).model_dump())
    return files


def exported_files(folder: Path) -> dict[str, ExportedFile]:
    """Return the files that gguf_report.json describes by their names, as far as they are in the folder.

    Files that were replaced by others are left out. Empty if there is no readable report.
    """
    try:
        report = _Report.model_validate_json((folder / REPORT).read_bytes())
    except (OSError, ValidationError):
        return {}
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.gguf")}
    return {name: file for name, file in report.files.items() if sizes.get(name) == file.bytes}


def _weights(path: Path, tensors: Sequence[Tensor]) -> dict[str, Rows]:
    """Return the weights of a GGUF file by their names in transformers."""
    import numpy as np
    from gguf import GGUFReader

    found = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    return {
        tensor.source.name: _Dequantized(
            found[tensor.name],
            np.argsort(interleaved(np.arange(tensor.source.shape[0]), tensor.heads)) if tensor.heads else None,
        )
        for tensor in tensors
    }
