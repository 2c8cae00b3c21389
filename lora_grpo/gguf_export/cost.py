"""Measure what each type of a GGUF file costs: the KL divergence from the model that it was made from.

KL(model || file) in nats per token over texts of the run, with the file's weights as they are dequantized and all else
in float32. llama.cpp also rounds the inputs of quantized weights, which is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import Rows, atomic, model_tensors
from lora_grpo.gguf_export import architecture
from lora_grpo.gguf_export.types import interleaved
from lora_grpo.merging import divergences_from, texts_of
from lora_grpo.models import base_model

REPORT = "gguf_report.json"
TEXTS = 8
"""Number of texts, with up to 32 tokens of an answer each."""


class GgufFile(BaseModel):
    """One file of an export."""

    model_config = ConfigDict(frozen=True)

    type: str
    bytes: int
    kl: float | None = None
    """KL(model || file) in nats per token."""
    texts: int = 0
    tokens: int = 0
    of_run: bool = False
    """Whether the texts are completions of the run, or plain text."""
    not_measured: str | None = None
    """The reason, if the divergence was not measured."""


class GgufReport(BaseModel):
    """The contents of gguf_report.json."""

    model_config = ConfigDict(frozen=True)

    files: dict[str, GgufFile]
    """The files in the folder, by name."""


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


def measure_costs(folder: Path, outputs: Mapping[str, Path], run: Path | None) -> GgufReport:
    """Measure the files of a model in `folder` by type, and write gguf_report.json beside them.

    The report keeps the entries of other files in that folder. `run` is the run that trained the model.
    """
    measured, texts, tokens, problem = dict[str, float](), 0, 0, None
    try:
        model = architecture.read_model(folder)
        tensors = architecture.named_tensors(model, model_tensors(folder), folder)
        tokenizer = base_model.load_tokenizer(ModelConfig(name=str(folder.absolute())))
        ids, keep = texts_of(tokenizer, run, TEXTS)
        others = {kind: _weights(path, tensors) for kind, path in outputs.items()}
        measured = divergences_from({tensor.source.name: tensor.source for tensor in tensors}, others, model, ids, keep)
        texts, tokens = len(ids), keep * len(ids)
    except Exception as error:  # noqa: BLE001 - models vary without limit, and a figure must not fail the export
        problem = ("" if isinstance(error, UserError) else f"{type(error).__name__}: ") + first_line(error)
    of_run = run is not None and any((run / "completions").glob("step-*.jsonl"))
    path = next(iter(outputs.values())).parent / REPORT
    known = read_gguf_report(path.parent)
    files = {
        name: file
        for name, file in (known.files if known else {}).items()
        if (path.parent / name).is_file() and (path.parent / name).stat().st_size == file.bytes
    }
    for kind, output in outputs.items():
        files[output.name] = GgufFile(
            type=kind,
            bytes=output.stat().st_size,
            kl=measured.get(kind),
            texts=texts,
            tokens=tokens,
            of_run=of_run,
            not_measured=problem,
        )
    report = GgufReport(files=files)
    atomic.write_json(path, report.model_dump())
    return report


def read_gguf_report(folder: Path) -> GgufReport | None:
    """Return the report of a folder of GGUF files, or None if it has no readable one."""
    try:
        return GgufReport.model_validate_json((folder / REPORT).read_bytes())
    except (OSError, ValidationError):
        return None


def _weights(path: Path, tensors: list[architecture.Tensor]) -> dict[str, Rows]:
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
