"""Rollouts from a full-precision copy of the policy, for machines where a 4-bit layer is slow to run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from lora_grpo.sampling.sampler import Sampler


class MergedCopySampler(Sampler):
    """Samples from a full-precision copy of the policy, into which the adapter is merged afresh.

    On a CPU a 4-bit layer is unpacked at every token, so a copy that is unpacked once decodes faster. The weights are
    computed from the frozen base each time, never updated in place: nothing drifts, and the copy is the policy to
    within rounding in float32.
    """

    def __init__(self, policy_model: Any, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        super().__init__(plain_copy(policy_model), tokenizer, eos_token_ids)
        self._adapted = [
            (self.model.get_submodule(name).weight, self.model.get_submodule(name).weight.detach().clone(), layer)
            for name, layer in policy_model.get_base_model().named_modules()
            if hasattr(layer, "get_delta_weight") and getattr(layer, "lora_A", None)
        ]

    def refresh(self, *, adapter: bool) -> None:
        """Make the copy equal to the policy as it is now, or to the base where `adapter` is False."""
        import torch

        with torch.no_grad():
            for weight, base, layer in self._adapted:
                weight.copy_(base)
                if adapter:
                    weight.add_(layer.get_delta_weight("default").to(weight.dtype))


def merges(policy_model: Any) -> bool:
    """Return whether an adapter is nothing but updates B·A of linear layers, which is what the copy is made of.

    Args:
        policy_model: a PEFT model.
    """
    config = policy_model.peft_config["default"]
    more = (config.use_dora, config.lora_bias, config.modules_to_save, config.bias != "none")
    embeds = any("lora_embedding_" in name for name, _ in policy_model.named_parameters())
    return not any(more) and not embeds and not config.trainable_token_indices


def plain_copy(model: Any) -> Any:
    """Return a frozen base as a new, unquantised float32 model.

    Args:
        model: a 4-bit or 16-bit model, or a PEFT model around one.
    """
    import torch
    from transformers import AutoModelForCausalLM

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.generation_config = copy.deepcopy(base.generation_config)
    targets = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers())
    with torch.no_grad():
        for name, tensor in {
            **dict(base.named_parameters(remove_duplicate=False)),
            **dict(base.named_buffers()),
        }.items():
            if ".lora_" in name:
                continue
            targets[name.replace(".base_layer.", ".")].copy_(dequantised(tensor))
    return plain.eval().requires_grad_(False)


def dequantised(tensor: Any) -> Any:
    """Return a weight in full precision, unpacked where bitsandbytes packed it."""
    if getattr(tensor, "quant_state", None) is None:
        return tensor
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(tensor.data, tensor.quant_state)
