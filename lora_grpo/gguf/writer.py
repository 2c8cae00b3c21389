"""Write a model folder as GGUF files, tensor by tensor. Every file is complete or absent."""

import contextlib
import math
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.commands import command
from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.files import atomic, disk, json_files, local_paths, model_tensors, unquantized
from lora_grpo.gguf import architecture
from lora_grpo.gguf.architecture import Tensor
from lora_grpo.gguf.files import ADAPTER_KEY
from lora_grpo.gguf.modelfile import write_modelfiles
from lora_grpo.gguf.tokenizer import Vocabulary, read_vocabulary
from lora_grpo.gguf.types import OWN_TYPES, Encoded
from lora_grpo.merging import read_report
from lora_grpo.models import base_model, model_files
from lora_grpo.progress import Progress

HEADER_BYTES = 32 << 20
"""Disk space reserved for the vocabulary and the tensor names."""
QUANTIZE = "llama-quantize"
_SAMPLING_KINDS: dict[str, type] = {
    "sequence": str,
    **dict.fromkeys(("top_k", "penalty_last_n", "mirostat"), int),
    **dict.fromkeys(("top_p", "min_p", "xtc_probability", "xtc_threshold", "temperature"), float),
    **dict.fromkeys(("penalty_repeat", "mirostat_tau", "mirostat_eta"), float),
}
"""Types of the sampling settings that gguf.Metadata reads from generation_config.json."""
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class SourceModel:
    """A transformers model to export."""

    config: Any
    tensors: Sequence[Tensor]
    tokenizer: Any
    vocabulary: Vocabulary
    card: Any
    """A `gguf.Metadata`."""
    adapter: str | None
    """Digest of the adapter that was merged into it; None if unknown."""


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
    k_quants, quantizer = [kind for kind in outputs if kind not in OWN_TYPES], shutil.which(QUANTIZE)
    if k_quants and quantizer is None:
        raise UserError(
            f"--type {k_quants[0]} needs llama.cpp's {QUANTIZE}, which is not on the PATH; install llama.cpp, or pass "
            f"another --type: {', '.join(OWN_TYPES)}"
        )
    kind, output = next(iter(outputs.items()))
    model = _read_model(folder, output.name.removesuffix(".gguf").removesuffix(f".{kind.upper()}"))
    output.parent.mkdir(parents=True, exist_ok=True)
    files = {path: kind for kind, path in outputs.items() if kind not in k_quants}
    # llama-quantize reads a file that keeps every bit of the weights.
    lossless = output.with_name(f".{output.name}.16bit")
    if k_quants:
        dtypes = {tensor.source.dtype for tensor in model.tensors}
        files[lossless] = dtypes.pop().lower() if dtypes in ({"BF16"}, {"F16"}) else "f32"
    encoded = {path: [Encoded.of(tensor, kind) for tensor in model.tensors] for path, kind in files.items()}
    sizes = {path: sum(tensor.nbytes for tensor in tensors) for path, tensors in encoded.items()}
    quantized = len(k_quants) * (sizes.get(lossless, 0) // 2)
    disk.check_free_space(output.parent, sum(sizes.values()) + quantized + len(outputs) * HEADER_BYTES)
    try:
        for path, kind in files.items():
            _write(path, kind, model, encoded[path])
        for kind in k_quants:
            with atomic.new_file(outputs[kind]) as temporary:
                _quantize(str(quantizer), lossless, temporary, kind)
    finally:
        lossless.unlink(missing_ok=True)
    notes, config = list(model.vocabulary.notes), model.config
    if (length := architecture.context_length(config)) < config.max_position_embeddings:
        notes.append(f"the context is {length} tokens, the model's sliding window")
    if modelfile:
        notes += write_modelfiles([*outputs.values()], model.tokenizer, model.vocabulary, system_prompt)
    return notes


def _read_model(folder: Path, name: str) -> SourceModel:
    """Read a model without the values of its weights. `name` is its name in the files."""
    import gguf

    base_model.prepare_torch(seed=0)
    network = architecture.read_model(folder)
    fix = f"merge into the 16-bit base first: {command('merge', 'RUN')}"
    tensors = architecture.named_tensors(network, unquantized(model_tensors(folder), folder, fix), folder)
    settings = ModelConfig(name=str(folder.absolute()))
    tokenizer = base_model.load_tokenizer(settings)
    eos_token_ids = base_model.eos_token_ids(settings, tokenizer, str(folder))
    config_ids = {"bos_token_id": network.config.bos_token_id}
    base_model.check_token_ids(config_ids, network.config.vocab_size, folder / "config.json")
    vocabulary = read_vocabulary(tokenizer, network.config.vocab_size, eos_token_ids, network.config.bos_token_id)
    _check_sampling_settings(folder)
    size = gguf.size_label(sum(math.prod(tensor.source.shape) for tensor in tensors), 0, 0, 0)
    card = _read_card(folder, name, size)
    merge = read_report(folder)
    adapter = merge.identity.get("adapter_sha256") if merge else None
    return SourceModel(network.config, tensors, tokenizer, vocabulary, card, adapter)


def _read_card(folder: Path, name: str, size_label: str) -> Any:
    """Return a `gguf.Metadata` of README.md and generation_config.json: license, base model, sampling settings.

    It is written once to a file that is deleted, because the gguf package (0.19) accepts any value until it writes it.

    Raises:
        UserError: README.md has a value that a GGUF file cannot have.
    """
    import gguf

    try:
        card = _read_public_card(folder)
        card.name, card.size_label = name, size_label
        with tempfile.TemporaryDirectory() as trial:
            writer: Any = gguf.GGUFWriter(Path(trial) / "card.gguf", "llama")
            card.set_gguf_meta_model(writer)
            with contextlib.closing(writer):
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
    except Exception as error:  # odd values raise many types
        raise UserError(
            f"{folder / 'README.md'}: its front matter has a value that a GGUF file cannot have ({first_line(error)}); "
            "correct it"
        ) from error
    return card


def _check_sampling_settings(folder: Path) -> None:
    """Raise a UserError if generation_config.json has a sampling setting that a GGUF file cannot have.

    The gguf package (0.19) writes the settings in `_SAMPLING_KINDS` and fails on values of other types.
    """
    path = folder / model_files.GENERATION_CONFIG
    settings = json_files.read_object(path) if path.is_file() else {}
    for name, kind in _SAMPLING_KINDS.items():
        value = settings.get(name)
        if value is None:
            continue
        if kind is str:
            is_right, expected = isinstance(value, str), "a text"
        elif kind is int:
            is_right = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31
            expected = "a whole number of 32 bits"
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_right = is_number and abs(value) <= _MAX_FLOAT32
            expected = "a number"
        if not is_right:
            raise UserError(f"{path}: {name} is {value!r:.80}; expected {expected}; correct it, or remove the field")


def _read_public_card(folder: Path) -> Any:
    """Return the `gguf.Metadata` of a model without local paths.

    It has the license, the base model and the data sets in README.md, and the sampling settings of
    generation_config.json.
    """
    import gguf

    metadata = gguf.Metadata.load(model_path=folder)
    card = _without_local_paths(gguf.Metadata.load_model_card(folder), folder)
    config = _without_local_paths(gguf.Metadata.load_hf_parameters(folder), folder)
    described = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), card, config, folder)
    for name, value in vars(described).items():
        if not name.startswith("sampling_"):
            setattr(metadata, name, value)
    return metadata


def _without_local_paths(value: Any, folder: Path, field: str = "") -> Any:
    """Return the front matter of a model card, or a part of it, without the values that are or contain local paths."""
    if isinstance(value, dict):
        public = {name: _without_local_paths(entry, folder, name) for name, entry in value.items()}
        return {name: entry for name, entry in public.items() if entry not in (None, {}, [])}
    if isinstance(value, list):
        entries = [_without_local_paths(entry, folder, field) for entry in value]
        return [entry for entry in entries if entry not in (None, {}, [])]
    if not isinstance(value, str):
        return value
    is_source = field.startswith(("base_model", "dataset", "_name_or_path")) and "://" not in value
    is_local = model_files.is_folder_name(value) if is_source else model_files.is_path(value)
    is_beside = field == "license_link" and value.startswith("./")
    is_private = (is_local and not is_beside) or local_paths.find(value, folder)
    return None if is_private else value


def _write(output: Path, file_type: str, model: SourceModel, tensors: Sequence[Encoded]) -> None:
    """Write a file of one of OWN_TYPES: its metadata, and then tensor by tensor."""
    import gguf
    import numpy as np

    writer: Any = gguf.GGUFWriter(None, architecture.ARCHITECTURES[model.config.architectures[0]])
    writer.add_type("model")
    model.card.set_gguf_meta_model(writer)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if file_type == "f32" else f"MOSTLY_{file_type.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    architecture.add_hyperparameters(writer, model.config)
    for name, value in model.vocabulary.fields.items():
        getattr(writer, f"add_{name}")(value)
    if model.adapter:
        writer.add_string(ADAPTER_KEY, model.adapter)

    factors = architecture.rope_factors(model.config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for each in tensors:
        # With a type given, this dtype only indicates that the shape counts weights, not bytes.
        shape, dtype = each.tensor.source.shape, np.dtype("float32")
        writer.add_tensor_info(each.tensor.name, shape, dtype, each.nbytes, each.kind)

    progress = Progress(len(tensors), f"GGUF {file_type}")
    try:
        with atomic.new_file(output) as temporary, contextlib.closing(writer):
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if factors is not None:
                writer.write_tensor_data(factors)
            for done, each in enumerate(tensors, 1):
                writer.write_tensor_data(each)
                progress.show(done, each.tensor.name)
    finally:
        progress.close()


def _quantize(program: str, source: Path, output: Path, kind: str) -> None:
    command = [program, str(source), str(output), kind.upper()]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise RunError(f"{QUANTIZE} failed with code {done.returncode}: {last[0]}")
