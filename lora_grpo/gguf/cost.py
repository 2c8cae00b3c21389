"""Measure the quality loss of each GGUF type: the KL divergence from the exported model.

KL(model || file) in nats per token over texts of the run, with the file's weights dequantized and everything else
in float32. llama.cpp also rounds the inputs of quantized weights, which is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import Rows
from lora_grpo.gguf.architecture import Tensor
from lora_grpo.gguf.files import ExportedFile, exported_files, write_files
from lora_grpo.gguf.types import interleaved
from lora_grpo.gguf.writer import SourceModel
from lora_grpo.merging import divergences, read_report, texts_of
from lora_grpo.sampling import read_header

TEXTS = 8
"""Number of texts, with up to 64 tokens of an answer each."""


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


def measure_costs(
    model: SourceModel, outputs: Mapping[str, Path], run: Path | None
) -> tuple[dict[str, ExportedFile], str]:
    """Measure the files of a model by type, and write gguf_report.json beside them.

    The report keeps the entries of other files in that folder. `run` is the run that trained the model. The
    model's network cannot be used afterward.

    Returns:
        The files by name, and the reason if the divergences were not measured.
    """
    folder, merge = next(iter(outputs.values())).parent, read_report(model.folder)
    measured, reason = dict[tuple[str, str], float](), ""
    try:
        ids, keep = texts_of(model.tokenizer, run, TEXTS)
        weights: dict[str, Mapping[str, Rows]] = {kind: _weights(path, model.tensors) for kind, path in outputs.items()}
        weights["model"] = {tensor.source.name: tensor.source for tensor in model.tensors}
        measured = divergences(weights, [("model", kind) for kind in outputs], model.network, ids, keep)
    except Exception as error:  # noqa: BLE001 - models vary without limit, and a figure must not fail the export
        reason = f"{'' if isinstance(error, UserError) else f'{type(error).__name__}: '}{first_line(error)}"
    files, adapter = exported_files(folder), merge.identity.get("adapter_sha256") if merge else None
    for kind, output in outputs.items():
        kl = max(0.0, round(measured["model", kind], 9)) if measured else None  # negative values are rounding errors
        files[output.name] = ExportedFile(type=kind, bytes=output.stat().st_size, kl=kl, adapter_sha256=adapter)
    write_files(folder, files)
    return files, reason


def _weights(path: Path, tensors: Sequence[Tensor]) -> dict[str, Rows]:
    """Return the weights of a GGUF file by their names in transformers."""
    import numpy as np

    found = {tensor.name: tensor for tensor in read_header(path).tensors}
    return {
        tensor.source.name: _Dequantized(
            found[tensor.name],
            np.argsort(interleaved(np.arange(tensor.source.shape[0]), tensor.heads)) if tensor.heads else None,
        )
        for tensor in tensors
    }
