"""The weights that an adapter is merged onto: the base's own, or what 4-bit training saw of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import StoredTensor, model_tensors
from lora_grpo.merging.delta import Tensor

Onto = Literal["full", "dequantized"]
_QUANT_STATE = ".quant_state.bitsandbytes__nf4"


def base_tensors(folder: Path, onto: Onto, *, trust_remote_code: bool) -> dict[str, Tensor]:
    """Return the base's tensors by name.

    Args:
        folder: the base's.
        onto: `full` takes them as they are; `dequantized` rounds every linear layer to NF4 and back, as
            bitsandbytes does when it loads a base in 4 bits (or unpacks those that are stored so).
        trust_remote_code: run the model's own code to find out which of its layers are linear.

    Raises:
        UserError: a tensor cannot be read, or the base is packed and `full` was asked for.
    """
    stored = model_tensors(folder)
    packed = {name.removesuffix(_QUANT_STATE) for name in stored if name.endswith(_QUANT_STATE)}
    strange = sorted(
        name
        for name, tensor in stored.items()
        if tensor.dtype not in ("F64", "F32", "F16", "BF16") and not name.startswith(tuple(packed) or ("\0",))
    )
    if strange:
        raise UserError(
            f"{folder} is quantised ({strange[0]} is {stored[strange[0]].dtype}), and an adapter is merged into 16 or "
            "32 bits; give the model that it was made of with --base"
        )
    if packed and onto == "full":
        raise UserError(
            f"{folder} is packed in 4 bits; give the 16-bit model that it was made of with --base (and --force-base), "
            "or pass --onto dequantized"
        )
    if onto == "full":
        return dict(stored)
    if packed:
        extras = {name for name in stored for weight in packed if name.startswith(f"{weight}.")}
        return {
            name: Packed.of(name, stored) if name in packed else tensor
            for name, tensor in stored.items()
            if name not in extras
        }
    linear = _linear_weights(folder, trust_remote_code)
    return {name: RoundTrip(tensor) if name in linear else tensor for name, tensor in stored.items()}


@dataclass
class RoundTrip:
    """A weight rounded to NF4 (double-quantised, blocks of 64) and back."""

    stored: StoredTensor
    _whole: Any = None

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def rows(self, start: int, stop: int) -> Any:
        """Return rows in float32."""
        if self._whole is None:
            _kept.hold(self)
            self._whole = self._unpack()
        return self._whole[start:stop].clone()

    def read(self) -> Any:
        """Return all of it in float32."""
        return self.rows(0, self.shape[0])

    def _unpack(self) -> Any:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        packed, state = quantize_4bit(self.stored.read().float(), quant_type="nf4", compress_statistics=True)
        return dequantize_4bit(packed, state)


@dataclass
class Packed(RoundTrip):
    """A weight that is stored in NF4."""

    parts: dict[str, StoredTensor] | None = None
    """The packed values' scales and tables, by the names bitsandbytes saves them under."""
    unpacked: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, stored: dict[str, StoredTensor]) -> Packed:
        """Return the packed weight of a name.

        Raises:
            UserError: its shape cannot be read.
        """
        parts = {key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(f"{name}.")}
        try:
            said = json.loads(bytes(parts[_QUANT_STATE[1:]].read().numpy().tobytes()))
            shape = tuple(int(size) for size in said["shape"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{stored[name].path}: how {name} is packed cannot be read ({error})") from None
        return cls(stored[name], parts=parts, unpacked=shape)

    @property
    def dtype(self) -> str:
        return "BF16"  # the precision that 4-bit models are computed in

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unpacked

    def _unpack(self) -> Any:
        import torch
        from bitsandbytes.functional import QuantState, dequantize_4bit

        assert self.parts is not None
        state = QuantState.from_dict({key: part.read() for key, part in self.parts.items()}, torch.device("cpu"))
        state.dtype = torch.float32
        return dequantize_4bit(self.stored.read(), state)


class _Kept:
    """Lets go of the last unpacked weight when the next is asked for: memory holds one."""

    def __init__(self) -> None:
        self._last: RoundTrip | None = None

    def hold(self, tensor: RoundTrip) -> None:
        if self._last is not None:
            self._last._whole = None
        self._last = tensor


_kept = _Kept()


def empty_model(folder: Path, *, trust_remote_code: bool) -> Any:
    """Return the model of a folder without its weights: parameters that have a shape and no memory.

    Raises:
        UserError: transformers cannot make it.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code).eval()
    except Exception as error:  # a configuration that is damaged or unknown raises many types
        reason = first_line(error)
        raise UserError(f"the model in {folder} cannot be made: {reason}") from error


def head_weight(folder: Path, *, trust_remote_code: bool) -> str | None:
    """Return the name of the weight of a model's head, or None where it has none."""
    model = empty_model(folder, trust_remote_code=trust_remote_code)
    head = model.get_output_embeddings()
    return next((f"{name}.weight" for name, module in model.named_modules() if module is head), None)


def _linear_weights(folder: Path, trust_remote_code: bool) -> set[str]:
    """Return the names of the weights that transformers rounds when it loads a model in 4 bits."""
    import torch
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = empty_model(folder, trust_remote_code=trust_remote_code)
    kept = get_keys_to_not_convert(model)
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and should_convert_module(name, kept)
    }
