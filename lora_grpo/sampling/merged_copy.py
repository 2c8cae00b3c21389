"""Sample from a full-precision copy of the policy, for machines where 4-bit layers are slow."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from lora_grpo.models import PATTERNS, SELECTION, features
from lora_grpo.sampling.grouped_attention import use_grouped_attention
from lora_grpo.sampling.sampler import Sampler

_BASE_LAYERS = re.compile(r"\.base_layer(?=\.|$)")
"""What PEFT's wrappers add to names."""


class MergedCopySampler(Sampler):
    """Samples from a full-precision copy of the policy with the adapter merged.

    On a CPU, 4-bit layers are dequantized for every token; this copy is dequantized once. Each `wake_up` computes the
    merged weights from the frozen base, so errors do not accumulate.
    """

    def __init__(self, policy_model: Any, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        super().__init__(use_grouped_attention(plain_copy(policy_model)), tokenizer, eos_token_ids)
        self._layers = []
        for name, layer in policy_model.get_base_model().named_modules():
            if hasattr(layer, "get_delta_weight") and getattr(layer, "lora_A", None):
                module = self.model.get_submodule(_BASE_LAYERS.sub("", name))
                weight = _as_linear(module, transpose=not layer.fan_in_fan_out)
                self._layers.append((weight, weight.clone(), layer))

    def wake_up(self, *, adapter: bool) -> None:
        """Update the copy to the current policy or to its base model."""
        import torch

        with torch.no_grad():
            for weight, base, layer in self._layers:
                weight.copy_(base)
                if adapter:
                    weight.add_(layer.get_delta_weight("default").to(weight.dtype))


def can_merge(policy_model: Any) -> bool:
    """Return whether the adapter of a PEFT model consists only of low-rank updates B·A of linear layers."""
    embeds = any("lora_embedding_" in name for name, _ in policy_model.named_parameters())
    found = set(features(policy_model.peft_config["default"].to_dict()))
    return not embeds and found <= {*PATTERNS, *SELECTION, "init_lora_weights"}


def plain_copy(model: Any) -> Any:
    """Return a copy of a model, or of the base of a PEFT model, unquantized and in float32."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(base)._from_config(config, dtype=torch.float32)
    plain.generation_config = copy.deepcopy(base.generation_config)
    targets = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers())
    with torch.no_grad():
        for name, tensor in (*base.named_parameters(remove_duplicate=False), *base.named_buffers()):
            if ".lora_" in name:
                continue
            name = _BASE_LAYERS.sub("", name)
            if getattr(tensor, "quant_state", None) is None:
                targets[name].copy_(tensor)
            else:
                weight = _as_linear(plain.get_submodule(name.removesuffix(".weight")), transpose=True)
                weight.copy_(dequantize_4bit(tensor.data, tensor.quant_state))
    return plain.eval().requires_grad_(False)


def _as_linear(module: Any, *, transpose: bool) -> Any:
    """Return a module's weight. With `transpose`, a Conv1D's (in, out) is returned as (out, in), as in 4-bit layers."""
    from transformers.pytorch_utils import Conv1D

    weight = module.weight.detach()
    return weight.T if transpose and isinstance(module, Conv1D) else weight
