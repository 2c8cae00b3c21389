"""The base model: its modules without weights, and its tensors as stored or as rounded in 4-bit training."""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lora_grpo.files import StoredTensor, model_tensors, unquantized
from lora_grpo.models import base_model

MergeTarget = Literal["full", "dequantized"]


def empty_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return a model whose parameters have shapes but use no memory. Raises UserError if it cannot be built."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    with base_model.loading(f"the model in {folder}"), init_empty_weights(include_buffers=False):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model = base_model.auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
        return base_model.text_only(model).eval()


def weight_name(model: Any, module: Any) -> str:
    """Return the name of a module's weight."""
    return next(f"{name}.weight" for name, candidate in model.named_modules() if candidate is module)


@dataclass(frozen=True)
class Nf4Tensor(StoredTensor):
    """A linear weight as used in 4-bit training: rounded to NF4, in float32."""

    def rows(self, start: int, stop: int) -> Any:
        return _rounded_to_nf4(self)[start:stop].clone()


@functools.lru_cache(maxsize=1)  # weights are large and are read one at a time
def _rounded_to_nf4(tensor: Nf4Tensor) -> Any:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(tensor.read().float(), quant_type="nf4", compress_statistics=True)
    return dequantize_4bit(packed, state)


def base_tensors(folder: Path, onto: MergeTarget, model: Any, name: str = "") -> dict[str, StoredTensor]:
    """Return the base's tensors by their names in the model.

    Args:
        folder: the base.
        onto: with `dequantized`, every linear layer is rounded to NF4 and back, as bitsandbytes does in 4-bit training.
        model: the result of `empty_model`.
        name: the requested name of the base, for errors.

    Raises:
        UserError: a tensor cannot be read, or the base is quantized.
    """
    unquantized_name = re.sub("(-unsloth)?-bnb-4bit$", "", name)  # Unsloth's names (unsloth/models/mapper.py)
    example = f", such as {unquantized_name}," if unquantized_name != name else ""
    fix = f"it cannot be merged into; pass the 16-bit model it was made from{example} with --base and --force-base"
    tensors = by_module(unquantized(model_tensors(folder), folder, fix), model)
    if onto == "dequantized":
        for name in _quantized_weights(model) & tensors.keys():
            stored = tensors[name]
            tensors[name] = Nf4Tensor(stored.name, stored.dtype, stored.shape, stored.path, stored.start)
    return tensors


def by_module(tensors: Mapping[str, StoredTensor], model: Any) -> dict[str, StoredTensor]:
    """Return tensors by their names in the model. transformers renames the tensors of some checkpoints on loading."""
    return dict(zip(current_names(tensors, model), tensors.values(), strict=True))


def current_names(names: Iterable[str], model: Any) -> list[str]:
    """Return the names that tensors of a checkpoint have in a model of this version of transformers.

    Only renames are applied. A `WeightConverter` would also join or split the tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    current = list(names)
    for rename in get_model_conversion_mapping(model):
        if not isinstance(rename, WeightConverter):
            current = [rename.rename_source_key(name)[0] for name in current]
    return current


def _quantized_weights(model: Any) -> set[str]:
    """Return the weights that transformers quantizes when it loads a model in 4 bits."""
    import torch
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = get_keys_to_not_convert(model)
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and should_convert_module(name, skipped)
    }
