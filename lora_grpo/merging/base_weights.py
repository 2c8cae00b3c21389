"""The base weights to merge into: as stored, or as 4-bit training used them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import Rows, StoredTensor, model_tensors

Onto = Literal["full", "dequantized"]
FLOATS = ("F64", "F32", "F16", "BF16")
_QUANT_STATE = ".quant_state.bitsandbytes__nf4"


class Tensor(Rows, Protocol):
    """A tensor of the base."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def path(self) -> Path: ...
    def read(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class Dequantized:
    """A linear weight as used in 4-bit training: NF4 values in float32."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    unpack: Callable[[], Any]

    def rows(self, start: int, stop: int) -> Any:
        return _unpacked(self)[start:stop].clone()

    def read(self) -> Any:
        return self.rows(0, self.shape[0])


@functools.lru_cache(maxsize=1)  # weights are large and are read one at a time
def _unpacked(weight: Dequantized) -> Any:
    return weight.unpack()


def base_tensors(folder: Path, onto: Onto, *, trust_remote_code: bool) -> dict[str, Tensor]:
    """Return the base's tensors by name.

    Args:
        folder: the base model.
        onto: `full` returns the stored tensors. `dequantized` rounds every linear layer to NF4 and back, as
            bitsandbytes does when it loads a model in 4 bits, or unpacks weights that are stored in NF4.
        trust_remote_code: run the model's own code to find its linear layers.

    Raises:
        UserError: a tensor cannot be read, or the base is quantized and `full` was requested.
    """
    stored = model_tensors(folder)
    packed = {name.removesuffix(_QUANT_STATE) for name in stored if name.endswith(_QUANT_STATE)}
    extras = {name for name in stored if any(name.startswith(f"{weight}.") for weight in packed)}
    for name in stored.keys() - packed - extras:
        if stored[name].dtype not in FLOATS:
            raise UserError(
                f"{folder} is quantized ({name} is {stored[name].dtype}) and cannot be merged into; pass the 16-bit "
                "model it was made from with --base"
            )
    if onto == "full":
        if packed:
            raise UserError(
                f"{folder} is packed in 4 bits; pass the 16-bit model it was made from with --base (and --force-base), "
                "or pass --onto dequantized"
            )
        return dict(stored)
    linear = packed or _linear_weights(folder, trust_remote_code)
    dequantize = _unpack_stored if packed else _round_to_nf4
    return {
        name: dequantize(tensor, stored) if name in linear else tensor
        for name, tensor in stored.items()
        if name not in extras
    }


def _round_to_nf4(tensor: StoredTensor, stored: dict[str, StoredTensor]) -> Dequantized:
    """Quantize a weight to NF4 (double quantization, blocks of 64) and dequantize it."""

    def unpack() -> Any:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        packed, state = quantize_4bit(tensor.read().float(), quant_type="nf4", compress_statistics=True)
        return dequantize_4bit(packed, state)

    return Dequantized(tensor.name, tensor.dtype, tensor.shape, tensor.path, unpack)


def _unpack_stored(tensor: StoredTensor, stored: dict[str, StoredTensor]) -> Dequantized:
    """Dequantize a weight that is stored in NF4. Its scales and tables have the names that bitsandbytes uses."""
    name = tensor.name
    parts = {key.removeprefix(f"{name}."): part for key, part in stored.items() if key.startswith(f"{name}.")}
    try:
        state = json.loads(bytes(parts[_QUANT_STATE[1:]].read().numpy().tobytes()))
        shape = tuple(int(size) for size in state["shape"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{tensor.path}: the quantization state of {name} cannot be read ({error})") from None

    def unpack() -> Any:
        import torch
        from bitsandbytes.functional import QuantState, dequantize_4bit

        state = QuantState.from_dict({key: part.read() for key, part in parts.items()}, torch.device("cpu"))
        state.dtype = torch.float32
        return dequantize_4bit(tensor.read(), state)

    return Dequantized(name, "BF16", shape, tensor.path, unpack)  # 4-bit models compute in bfloat16


def empty_model(folder: Path, *, trust_remote_code: bool) -> Any:
    """Return a model on the meta device: its parameters have shapes but use no memory.

    Raises:
        UserError: transformers cannot build it.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code).eval()
    except Exception as error:  # damaged or unknown configurations raise many exception types
        raise UserError(f"the model in {folder} cannot be built: {first_line(error)}") from error


def head_weight(folder: Path, *, trust_remote_code: bool) -> str | None:
    """Return the name of the model's head weight, or None if there is no head."""
    model = empty_model(folder, trust_remote_code=trust_remote_code)
    head = model.get_output_embeddings()
    return next((f"{name}.weight" for name, module in model.named_modules() if module is head), None)


def _linear_weights(folder: Path, trust_remote_code: bool) -> set[str]:
    """Return the names of the weights that transformers quantizes when it loads a model in 4 bits."""
    import torch
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = empty_model(folder, trust_remote_code=trust_remote_code)
    skipped = get_keys_to_not_convert(model)
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and should_convert_module(name, skipped)
    }
