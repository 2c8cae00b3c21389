"""Sample from a full-precision copy of the policy, for machines where 4-bit layers are slow."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_grpo.models import PATTERNS, SELECTION, base_model, base_of, features
from lora_grpo.sampling.sampler import Sampler

if TYPE_CHECKING:
    import torch

_BASE_LAYERS = re.compile(r"\.base_layer(?=\.|$)")
"""Parts that PEFT's wrappers add to names."""


class MergedCopySampler(Sampler):
    """Samples from a full-precision copy of the policy with the adapter merged.

    On a CPU, 4-bit layers are dequantized for every token; this copy is dequantized once. Each `wake_up` computes the
    merged weights from the frozen base, so errors do not accumulate.
    """

    def __init__(self, policy_model: Any, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        super().__init__(use_grouped_attention(plain_copy(policy_model)), tokenizer, eos_token_ids)
        self._layers: list[_AdaptedLayer] = []
        for name, layer in policy_model.get_base_model().named_modules():
            if hasattr(layer, "get_delta_weight") and getattr(layer, "lora_A", None):
                weight = self.model.get_submodule(_BASE_LAYERS.sub("", name)).weight.detach()
                self._layers.append(_AdaptedLayer(weight, weight.clone(), layer))

    def wake_up(self, *, adapter: bool) -> None:
        """Update the copy to the current policy or to its base model."""
        import torch

        with torch.no_grad():
            for adapted in self._layers:
                adapted.weight.copy_(adapted.base_weight)
                if adapter:
                    update = adapted.layer.get_delta_weight("default")
                    adapted.weight.add_(update.to(adapted.weight.dtype))


@dataclass(frozen=True)
class _AdaptedLayer:
    """A layer of the copy whose weight is that of the base plus the adapter's update."""

    weight: torch.Tensor
    """The weight in the copy, which changes in place."""
    base_weight: torch.Tensor
    """That weight without an update."""
    layer: Any
    """The layer of the policy, a PEFT layer, which computes the update."""


def can_merge(policy_model: Any) -> bool:
    """Return whether a model has an adapter that consists only of low-rank updates B·A of linear layers.

    Its base must be unquantized or in bitsandbytes' 4 bits. Other methods of quantization either do more in a layer
    than multiply by its dequantized weights (`load_in_8bit` also quantizes activations), or store scales by other
    names.
    """
    if not hasattr(policy_model, "peft_config"):
        return False
    embeds = any("lora_embedding_" in name for name, _ in policy_model.named_parameters())
    adapter_features = set(features(policy_model.peft_config["default"].to_dict()))
    supported = {*PATTERNS, *SELECTION, "init_lora_weights"}
    return not embeds and adapter_features <= supported and _can_copy(policy_model)


def _can_copy(model: Any) -> bool:
    """Return whether `plain_copy` can read every weight of the base of a PEFT model."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    base = model.get_base_model()
    settings = getattr(base.config, "quantization_config", None)
    if settings is not None and not getattr(base, "is_loaded_in_4bit", False):
        return False
    for weight in base.parameters():
        if getattr(weight, "quant_state", None) is not None:  # 4 bits of bitsandbytes
            continue
        is_16_bit = weight.is_floating_point() and weight.element_size() >= 2
        if not is_16_bit or is_traceable_wrapper_subclass(weight):
            return False
    return True


def plain_copy(model: Any) -> Any:
    """Return a copy of a model, or of the base of a PEFT model, unquantized and in float32."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    base = base_of(model)
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # An adapter on the output head must not change the input embeddings, which may share their weight with it.
    if hasattr(base.get_output_embeddings(), "lora_A"):
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
    plain = base_model.text_only(type(base)._from_config(config, dtype=torch.float32))
    plain.generation_config = copy.deepcopy(base.generation_config)

    # Copy every tensor of the base. Tied weights have several names.
    copied = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers())
    with torch.no_grad():
        for name, tensor in (*base.named_parameters(remove_duplicate=False), *base.named_buffers()):
            if ".lora_" in name:
                continue
            quant_state = getattr(tensor, "quant_state", None)
            values = tensor if quant_state is None else dequantize_4bit(tensor.data, quant_state)
            copied[_BASE_LAYERS.sub("", name)].copy_(values)
    return plain.eval().requires_grad_(False)


def use_grouped_attention(model: Any) -> Any:
    """Enable attention for one token per row in a model that only samples, if possible, and return the model.

    With a mask, transformers repeats keys and values for each query head, in every layer and for every token. Here, the
    query heads that share a head of keys are several queries of it. The result is the same except for rounding.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    # A copy that is made after the trainer has the trainer's setting, `shared_prompts`, which is sdpa without a packing
    # (loss/attention.py).
    if model._supports_attention_backend and model.config._attn_implementation in ("sdpa", "shared_prompts"):
        AttentionInterface.register("lora_grpo_grouped", _attend)
        AttentionMaskInterface.register("lora_grpo_grouped", sdpa_mask)
        model.config._attn_implementation = "lora_grpo_grouped"
    return model


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with one token per row. Anything else uses transformers' `sdpa_attention_forward`.

    Args:
        query: (R, heads, T, width).
        key: (R, key heads, L, width).
        value: (R, key heads, L, value width).
        attention_mask: (R, 1, T, L), True for tokens to attend to.

    Returns:
        (R, T, heads, value width).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, tokens, width = query.shape
    if tokens > 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    # With one token per row, the heads that share a head of keys take the place of tokens.
    key_heads = key.shape[1]
    grouped = query.reshape(rows, key_heads, heads // key_heads, width)
    scores = grouped @ key.transpose(2, 3) * (kwargs.get("scaling") or width**-0.5)  # (R, key heads, group, L)
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask, -math.inf)
    output = scores.softmax(dim=-1) @ value
    return output.reshape(rows, 1, heads, -1), None
