"""Write a model folder as GGUF files, tensor by tensor. Every file is complete or absent."""

import contextlib
import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lora_grpo.commands import command
from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import atomic, disk, model_tensors, unquantized
from lora_grpo.gguf import architecture
from lora_grpo.gguf.architecture import Tensor
from lora_grpo.gguf.files import ADAPTER_KEY
from lora_grpo.gguf.metadata import read_metadata
from lora_grpo.gguf.modelfile import check_modelfiles, write_modelfiles
from lora_grpo.gguf.tokenizer import Vocabulary, read_vocabulary
from lora_grpo.gguf.types import DIRECT_TYPES, Encoded
from lora_grpo.merging import read_report
from lora_grpo.models import base_model, engines, stop_tokens
from lora_grpo.progress import Progress, waiting

HEADER_BYTES = 32 << 20
"""Disk space reserved for the vocabulary and the tensor names."""
QUANTIZE = "llama-quantize"


@dataclass(frozen=True)
class SourceModel:
    """A transformers model to export."""

    config: Any
    tensors: Sequence[Tensor]
    tokenizer: Any
    vocabulary: Vocabulary
    metadata: Any
    """A `gguf.Metadata`."""
    adapter_sha256: str | None
    """Digest of the adapter that was merged into it; None if unknown."""


@dataclass(frozen=True)
class _File:
    """A file to write, of one of DIRECT_TYPES."""

    path: Path
    type: str
    tensors: Sequence[Encoded]

    @classmethod
    def of(cls, path: Path, file_type: str, model: SourceModel) -> Self:
        return cls(path, file_type, [Encoded.of(tensor, file_type) for tensor in model.tensors])

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def write_gguf(
    folder: Path, outputs: Mapping[str, Path], *, modelfile: bool = False, system_prompt: str | None = None
) -> list[str]:
    """Write a transformers model as GGUF files of several types. Return notes for the user.

    Args:
        folder: a 16-bit or 32-bit model with its tokenizer.
        outputs: the file of each type, one of `types.TypeName`, all in one folder. An existing file is replaced when
            the new one is complete.
        modelfile: write an Ollama Modelfile next to each file, with the system prompt.

    Raises:
        UserError: the model cannot be exported, or the disk does not have enough space.
        RunError: llama-quantize failed.
    """
    quantized_types = [file_type for file_type in outputs if file_type not in DIRECT_TYPES]
    quantize_program = shutil.which(QUANTIZE)
    if quantized_types and quantize_program is None:
        raise UserError(
            f"--type {quantized_types[0]} needs llama.cpp's {QUANTIZE}, which is not on the PATH; install llama.cpp, "
            f"or pass another --type: {', '.join(DIRECT_TYPES)}"
        )
    first_type, first_output = next(iter(outputs.items()))
    # The model's name in the files, whose own names are NAME.TYPE.gguf.
    name = first_output.name.removesuffix(".gguf").removesuffix(f".{first_type.upper()}")
    model = _read_model(folder, name)
    first_output.parent.mkdir(parents=True, exist_ok=True)

    # The files to write directly. llama-quantize reads one that keeps every bit of the weights.
    files = [_File.of(path, file_type, model) for file_type, path in outputs.items() if file_type in DIRECT_TYPES]
    # If this process is killed, it stays. Its name is the same for all types, so that any of them replaces it.
    lossless_path = first_output.with_name(f".{name}.16bit")
    needed_bytes = len(outputs) * HEADER_BYTES
    if quantized_types:
        lossless_file = _File.of(lossless_path, _lossless_type(model), model)
        files.append(lossless_file)
        # Half of it is an upper limit of each file that llama-quantize makes: Q6_K, the largest type, has 6.6 bits per
        # weight.
        needed_bytes += len(quantized_types) * (lossless_file.num_bytes // 2)
    needed_bytes += sum(file.num_bytes for file in files)
    disk.check_free_space(first_output.parent, needed_bytes)

    try:
        for file in files:
            _write(file, model)
        for file_type in quantized_types:
            with atomic.new_file(outputs[file_type]) as temporary:
                _quantize(str(quantize_program), lossless_path, temporary, file_type)
    finally:
        lossless_path.unlink(missing_ok=True)

    notes = list(model.vocabulary.notes)
    context_tokens = architecture.context_length(model.config)
    if context_tokens < model.config.max_position_embeddings:
        notes.append(f"the context is {context_tokens} tokens, the model's sliding window")
    for_ollama = write_modelfiles if modelfile else check_modelfiles
    notes += for_ollama(list(outputs.values()), model.tokenizer, model.vocabulary, system_prompt)
    return notes


def _read_model(folder: Path, name: str) -> SourceModel:
    """Read a model without the values of its weights. `name` is its name in the files."""
    import gguf

    engines.prepare_torch(seed=0)
    network = architecture.read_model(folder)
    fix = f"merge into the 16-bit base first: {command('merge', 'RUN')}"
    stored = unquantized(model_tensors(folder), folder, fix)
    tensors = architecture.named_tensors(network, stored, folder)

    settings = ModelConfig(name=str(folder.absolute()))
    tokenizer = base_model.load_tokenizer(settings)
    eos_token_ids = stop_tokens.eos_token_ids(settings, tokenizer, str(folder))
    bos_token_id = network.config.bos_token_id
    vocab_size = network.config.vocab_size
    stop_tokens.check_token_ids({"bos_token_id": bos_token_id}, vocab_size, folder / "config.json")
    vocabulary = read_vocabulary(tokenizer, vocab_size, eos_token_ids, bos_token_id)

    num_parameters = sum(math.prod(tensor.source.shape) for tensor in tensors)
    metadata = read_metadata(folder, name, gguf.size_label(num_parameters, 0, 0, 0))
    merge = read_report(folder)
    return SourceModel(
        config=network.config,
        tensors=tensors,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        metadata=metadata,
        adapter_sha256=merge.identity.get("adapter_sha256") if merge else None,
    )


def _lossless_type(model: SourceModel) -> str:
    """Return the type that keeps every bit of the weights: their own 16-bit dtype if they share one, else f32."""
    dtypes = {tensor.source.dtype for tensor in model.tensors}
    if dtypes == {"BF16"}:
        return "bf16"
    if dtypes == {"F16"}:
        return "f16"
    return "f32"


def _write(file: _File, model: SourceModel) -> None:
    """Write a file: its metadata, and then tensor by tensor."""
    import gguf
    import numpy as np

    # Metadata.
    writer: Any = gguf.GGUFWriter(None, architecture.llama_cpp_name(model.config))
    writer.add_type("model")
    model.metadata.set_gguf_meta_model(writer)
    file_type_name = "ALL_F32" if file.type == "f32" else f"MOSTLY_{file.type.upper()}"
    writer.add_file_type(gguf.LlamaFileType[file_type_name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    architecture.add_hyperparameters(writer, model.config)
    for name, value in model.vocabulary.fields.items():
        add_field = getattr(writer, f"add_{name}")
        add_field(value)
    if model.adapter_sha256:
        writer.add_string(ADAPTER_KEY, model.adapter_sha256)

    # Names, shapes and types of all tensors come before their data.
    rope_factors = architecture.rope_factors(model.config)
    if rope_factors is not None:
        writer.add_tensor_info("rope_freqs.weight", rope_factors.shape, rope_factors.dtype, rope_factors.nbytes)
    # The type in the file is `encoded.kind`. A dtype of uint8 would mean that shapes count bytes; with any other, they
    # count weights.
    not_bytes = np.dtype("float32")
    for encoded in file.tensors:
        tensor = encoded.tensor
        writer.add_tensor_info(tensor.name, tensor.source.shape, not_bytes, encoded.nbytes, encoded.kind)

    progress = Progress(len(file.tensors), f"GGUF {file.type}")
    try:
        with atomic.new_file(file.path) as temporary, contextlib.closing(writer):
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if rope_factors is not None:
                writer.write_tensor_data(rope_factors)
            for num_written, encoded in enumerate(file.tensors, 1):
                writer.write_tensor_data(encoded)
                progress.show(num_written, encoded.tensor.name)
    finally:
        progress.close()


def _quantize(program: str, source: Path, output: Path, file_type: str) -> None:
    """Have llama-quantize make a file of another type."""
    arguments = [program, str(source), str(output), file_type.upper()]
    with waiting(f"{QUANTIZE} writes {output.name}"):
        result = subprocess.run(arguments, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        last_line = lines[-1] if lines else "no output"
        raise RunError(f"{QUANTIZE} failed with code {result.returncode}: {last_line}")
