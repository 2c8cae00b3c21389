"""Write an adapter as a GGUF file for llama.cpp's `--lora`, which adds it to a GGUF file of the base.

llama.cpp computes W x + alpha / r * B (A x), with one alpha for the file and r from the shape of B. rsLoRA's scale goes
into alpha; scales that differ by a pattern of ranks or alphas go into B. Tensors are F32: adapters are trained in F32,
so nothing is rounded, and a file is small beside its base.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-adapter.cpp
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lora_grpo.errors import UserError
from lora_grpo.files import StoredTensor, adapter_tensors, atomic, disk, json_files, same_values
from lora_grpo.gguf import architecture
from lora_grpo.gguf.architecture import EMBEDDING, HEAD
from lora_grpo.gguf.file import new_gguf
from lora_grpo.gguf.types import interleaved
from lora_grpo.merging import LowRank, Plan, plan_of
from lora_grpo.models import ADAPTER_CONFIG, BEST, base_model

LORA_FILE = "adapter_model.gguf"
"""The name of the file, beside adapter_model.safetensors."""
HEADER_BYTES = 1 << 20
"""Disk space reserved for the names."""
_FIX = "export the merged model with --what merged"
_SETTINGS = {
    "use_dora": "DoRA",
    "modules_to_save": "fully trained modules",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "stacked experts",
}
_KEYS = {
    ".lora_magnitude_vector": "DoRA",
    ".trainable_tokens_delta": "trained tokens",
    ".bias": "trained biases",
}


@dataclass(frozen=True)
class _Factor:
    """A or B of one tensor as GGUFWriter takes it, read when it is written."""

    name: str
    stored: StoredTensor
    factor: float = 1.0
    heads: int | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[::-1] if self.transposed else self.stored.shape

    @property
    def nbytes(self) -> int:
        return 4 * self.shape[0] * self.shape[1]

    def tofile(self, file: IO[bytes]) -> None:
        import numpy as np

        values = self.stored.read().float().numpy() * np.float32(self.factor)
        if not np.isfinite(values).all():
            raise UserError(f"{self.stored.name} holds NaN or infinity; train again")
        values = values.T if self.transposed else values
        values = interleaved(values, self.heads) if self.heads else values
        file.write(memoryview(np.ascontiguousarray(values)).cast("B"))  # type: ignore[arg-type]


def write_lora(adapter: Path, output: Path) -> None:
    """Write the adapter in a folder as a GGUF file. An existing file is replaced when the new one is complete.

    Raises:
        UserError: llama.cpp cannot apply this adapter, or its base is missing or not supported. Nothing is written.
    """
    import gguf
    import numpy as np

    _check(adapter)
    base_model.prepare_torch(seed=0)
    target, plan = plan_of(adapter)
    config = architecture.read_model(Path(target.base.name)).config
    alpha, factors = _factors(adapter, plan, config)
    writer = gguf.GGUFWriter(None, architecture.ARCHITECTURES[config.architectures[0]])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    writer.add_name(_name(adapter.resolve()))
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, Path(target.base_name).name)  # files are published: no path of this machine
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for factor in factors:
        writer.add_tensor_info(factor.name, factor.shape, np.dtype("float32"), factor.nbytes)
    num_bytes = sum(factor.nbytes for factor in factors)
    with atomic.write_errors(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
    disk.check_free_space(output.parent, num_bytes + HEADER_BYTES)
    with new_gguf(writer, output, num_bytes):
        for factor in factors:
            writer.write_tensor_data(factor)  # type: ignore[arg-type]


def _name(adapter: Path) -> str:
    names = {"adapter": adapter.parent.name, BEST: f"{adapter.parent.name}-{BEST}"}
    return names.get(adapter.name, adapter.name)


def _check(adapter: Path) -> None:
    """Raise a UserError, before the base is looked for, if the adapter trains more than products of two matrices."""
    settings = json_files.read_object(adapter / ADAPTER_CONFIG)
    found = next((text for name, text in _SETTINGS.items() if settings.get(name)), None)
    keys = adapter_tensors(adapter / "adapter_model.safetensors")
    found = found or next((text for end, text in _KEYS.items() for key in keys if key.endswith(end)), None)
    if found:
        raise UserError(f"{adapter} has {found}, which llama.cpp's --lora cannot apply; {_FIX}")


def _factors(adapter: Path, plan: Plan, config: Any) -> tuple[float, list[_Factor]]:
    """Return the alpha of the file, and A and B of every tensor in the order of the base."""
    find = architecture.tensor_names(config)
    updates: dict[str, LowRank] = {}
    for name, output in plan.outputs.items():
        # PEFT saves the unchanged embedding with an adapter of it.
        if output.replacement and not same_values(output.replacement, output.base):
            raise UserError(f"{adapter} has a trained or resized {name}, which llama.cpp's --lora cannot apply; {_FIX}")
        if output.low_rank:
            updates[name] = output.low_rank
    if not updates:
        raise UserError(f"{adapter} has no LoRA matrices; there is nothing to export")
    tied = plan.tie_word_embeddings is False or HEAD not in plan.outputs
    if odd := {EMBEDDING, HEAD} & updates.keys() if tied else None:
        raise UserError(
            f"{adapter} trains {odd.pop()}, which the base uses as embedding and as head; llama.cpp cannot change only "
            f"one of them; {_FIX}"
        )
    # alpha of the file, so that alpha / r is the scale of as many tensors as possible
    wanted = {name: update.scale * update.b.shape[1] for name, update in updates.items()}
    alpha = Counter(value for value in wanted.values() if value).most_common(1)
    common = alpha[0][0] if alpha else 1.0  # llama.cpp reads 0 as a scale of 1
    factors = []
    for name, update in updates.items():
        gguf_name, heads = find(name)
        if gguf_name is None:
            raise UserError(f"{adapter} trains {name}, which llama.cpp does not have in this architecture; {_FIX}")
        # llama.cpp looks up rows of the embedding's A, and multiplies them by B.
        a = _Factor(f"{gguf_name}.lora_a", update.a, transposed=name == EMBEDDING)
        factors += [a, _Factor(f"{gguf_name}.lora_b", update.b, wanted[name] / common, heads)]
    return common, factors
