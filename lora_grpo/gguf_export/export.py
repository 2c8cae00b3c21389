"""One model folder into one GGUF file, for llama.cpp, Ollama and LM Studio: whole under its name, or not there.

The gguf package writes the format, names the tensors and quantises; nothing of that is done here. A tensor goes from
disk to disk a few rows at a time, so that memory holds none of the large ones whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.files import model_tensors
from lora_grpo.gguf_export import architecture
from lora_grpo.gguf_export import types as gguf_types
from lora_grpo.gguf_export.architecture import Tensor
from lora_grpo.gguf_export.modelfile import write_modelfile
from lora_grpo.gguf_export.tokenizer import Vocabulary, read_vocabulary
from lora_grpo.models import base_model
from lora_grpo.progress import Progress

HEADER_BYTES = 32 << 20
"""Room for what comes before the tensors: the vocabulary, and the names of the tensors."""
QUANTIZE = "llama-quantize"


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    path: Path
    modelfile: Path | None
    notes: list[str]
    """What a user should know, one line each."""


def export(
    folder: Path,
    output: Path,
    type: str,
    *,
    modelfile: bool = False,
    system_prompt: str | None = None,
    temperature: float | None = None,
) -> Exported:
    """Write a model's folder as one GGUF file.

    Args:
        folder: a merged transformers model of 16 or 32 bits with its tokenizer.
        output: the file; an older one is replaced when the new one is whole.
        type: one of `gguf_types.TYPES`, or one that llama-quantize makes.
        modelfile: write an Ollama Modelfile beside it.
        system_prompt: what the model was trained under, for the Modelfile.
        temperature: what it was trained or evaluated at, for the Modelfile.

    Raises:
        UserError: the folder cannot be exported, or the disk is too small; nothing is left under the file's name.
        RunError: llama-quantize failed.
    """
    quantizer = _quantizer(type)
    base_model.prepare_torch(seed=0)
    config = architecture.read_config(folder)
    stored = model_tensors(folder)
    tensors = architecture.model_tensors_named(config, stored, folder)
    tokenizer = base_model.load_tokenizer(ModelConfig(name=str(folder.absolute())))
    ends = base_model.eos_token_ids(_generation_config(folder, config), tokenizer, str(folder))
    vocabulary = read_vocabulary(tokenizer, config.vocab_size, ends, config.bos_token_id)
    notes = list(vocabulary.notes)
    if (length := architecture.context_length(config)) < config.max_position_embeddings:
        notes.append(f"the context is {length} tokens, as far as the model's sliding window reaches")
    with _disk_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    name = output.name.removesuffix(".gguf").removesuffix(f".{type.upper()}")
    if quantizer is None:
        notes += _write(folder, output, name, type, config, tensors, vocabulary)
    else:
        halfway = output.with_name(f".{output.name}.16bit")
        try:
            _write(folder, halfway, name, _exact_type(tensors), config, tensors, vocabulary)
            _quantize(quantizer, halfway, output, type)
        finally:
            halfway.unlink(missing_ok=True)
    beside = None
    if modelfile:
        beside, said = write_modelfile(output, tokenizer, vocabulary, system_prompt, temperature)
        notes += said
    return Exported(output, beside, notes)


def _quantizer(kind: str) -> str | None:
    """Return the program that makes a type, or None where the gguf package does."""
    if kind in gguf_types.TYPES:
        return None
    if kind not in gguf_types.QUANTIZE_TYPES:
        known = ", ".join((*gguf_types.TYPES, *gguf_types.QUANTIZE_TYPES))
        raise UserError(f"--type {kind} is no type of a GGUF; expected one of {known}")
    found = shutil.which(QUANTIZE)
    if found is None:
        near = {"q6": "q8_0", "q5": "q5_1"}.get(kind[:2], "q4_1")
        raise UserError(
            f"--type {kind} needs llama.cpp's {QUANTIZE} on the PATH, which is not there; install llama.cpp, or pass "
            f"--type {near}"
        )
    return found


def _exact_type(tensors: Sequence[Tensor]) -> str:
    """Return the type that loses nothing of the weights."""
    dtypes = {tensor.source.dtype for tensor in tensors}
    return dtypes.pop().lower() if dtypes in ({"BF16"}, {"F16"}) else "f32"


def _generation_config(folder: Path, config: Any) -> Any:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        try:
            return GenerationConfig.from_pretrained(folder)
        except Exception as error:  # what is damaged raises many types
            raise UserError(f"{folder / 'generation_config.json'} cannot be read ({first_line(error)})") from error
    return GenerationConfig.from_model_config(config)


def _metadata(folder: Path) -> Any:
    """Return what the model's card and generation_config.json say: licence, base model, how to sample."""
    import gguf
    import yaml

    try:
        return gguf.Metadata.load(model_path=folder)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{folder / 'README.md'} cannot be read ({first_line(error)})") from None


def _write(
    folder: Path,
    output: Path,
    name: str,
    kind: str,
    config: Any,
    tensors: Sequence[Tensor],
    vocabulary: Vocabulary,
) -> list[str]:
    """Write the file under a temporary name, flush it to disk and rename it; return what a user should know."""
    import gguf
    import numpy as np

    shapes = {tensor.name: tensor.source.shape for tensor in tensors}
    types = {name: gguf_types.tensor_type(kind, name, shape) for name, shape in shapes.items()}
    sizes = {name: gguf_types.num_bytes(types[name], shape) for name, shape in shapes.items()}
    _check_disk(output, sum(sizes.values()))

    temporary = output.with_name(f".{output.name}.partial")
    writer = gguf.GGUFWriter(temporary, architecture.ARCHITECTURES[config.architectures[0]])
    writer.add_type("model")
    metadata = _metadata(folder)
    metadata.name = name
    metadata.size_label = gguf.size_label(sum(tensor.num_elements for tensor in tensors), 0, 0, 0)
    metadata.set_gguf_meta_model(writer)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    architecture.add_hyperparameters(writer, config)
    vocabulary.add_to(writer)

    factors = architecture.rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for tensor in tensors:
        qtype = gguf.GGMLQuantizationType[types[tensor.name].upper()]
        # With a type given, the dtype says nothing but that the shape counts weights and not bytes.
        writer.add_tensor_info(tensor.name, tensor.source.shape, np.dtype("float32"), sizes[tensor.name], qtype)
    try:
        with _disk_errors(output):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if factors is not None:
                writer.write_tensor_data(factors)
            progress = Progress(len(tensors), "GGUF")
            try:
                for done, tensor in enumerate(tensors, 1):
                    stream = _Stream(tensor, types[tensor.name], sizes[tensor.name])
                    writer.write_tensor_data(stream)  # type: ignore[arg-type]
                    progress.show(done, tensor.name)
            finally:
                progress.close()
            writer.flush()
            assert writer.fout is not None
            os.fsync(writer.fout[0].fileno())
            writer.close()
        temporary.replace(output)
    finally:
        with contextlib.suppress(OSError):  # of a full disk, again
            writer.close()
        with contextlib.suppress(OSError):  # of a folder that nothing could be written to either
            temporary.unlink(missing_ok=True)
    odd = [name for name in types if kind.startswith("q") and types[name] == "f16"]
    return [f"{len(odd)} tensors are F16, as their rows do not divide by 32: {', '.join(odd[:3])}"] if odd else []


class _Stream:
    """A tensor that is written as it is read; to the writer an array."""

    def __init__(self, tensor: Tensor, kind: str, nbytes: int) -> None:
        self._tensor, self._kind, self.nbytes = tensor, kind, nbytes

    def tofile(self, file: IO[bytes]) -> None:
        for piece in gguf_types.encoded(self._tensor.source, self._kind, self._tensor.heads):
            file.write(memoryview(piece).cast("B"))  # NumPy's own tofile hides that the disk is full


@contextlib.contextmanager
def _disk_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk of {output.parent} is full; make room, and give the same command again"
            ) from None
        raise UserError(f"{error.filename or output}: {error.strerror}; --output takes another file") from error


def _check_disk(output: Path, tensors: int) -> None:
    needed, free = tensors + HEADER_BYTES, shutil.disk_usage(output.parent).free
    if free < needed:
        raise UserError(
            f"{output.parent} has {free / 1e9:.2f} GB left and {output.name} takes {needed / 1e9:.2f} GB; make room, "
            "or pass --output on another disk"
        )


def _quantize(program: str, source: Path, output: Path, kind: str) -> None:
    temporary = output.with_name(f".{output.name}.partial")
    _check_disk(output, source.stat().st_size // 2)
    try:
        said = subprocess.run([program, source, temporary, kind.upper()], capture_output=True, text=True, check=False)
        if said.returncode:
            last = (said.stderr or said.stdout).strip().splitlines()[-1:] or ["it said nothing"]
            raise RunError(f"{QUANTIZE} failed with code {said.returncode}: {last[0]}")
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
