"""Norms and MLPs of the decoder layers, with their LoRA layers, as kernels that torch.compile fuses.

Eager PyTorch writes each intermediate tensor of a norm, an activation and a LoRA layer to memory and reads it again.
Attention is not compiled: that of packed rows is in `attention.py`.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

from lora_grpo.errors import first_line
from lora_grpo.models import base_of

_PROBE_TOKENS = 8


def compile_layers(model: Any) -> str:
    """Compile norms and MLPs of the decoder layers in place, and return why that is not possible, or "".

    Compiled code runs in training mode only, so sampling and evaluation stay as they are. Call this in the trainer's
    autocast, in which it tests the compiler on the first layer. The other layers share its kernels.
    """
    base = base_of(model)
    layers = list(getattr(base.get_decoder(), "layers", ()))
    modules = [module for layer in layers for module in _norms_and_mlp(layer)]
    if not modules:
        return f"the layers of the {base.config.model_type} model have no norm and no mlp"
    reason = _compiler_obstacle(base, layers[0])
    if reason:
        return reason
    for module in modules:
        module.forward = types.MethodType(_forward, module)
    return ""


def restore_layers(model: Any) -> None:
    """Undo `compile_layers`."""
    for module in model.modules():
        if _is_compiled(module):
            del module.forward


def _norms_and_mlp(layer: Any) -> Iterator[Any]:
    """Yield the norms and the MLP of a decoder layer, except those whose `forward` something else has replaced."""
    for name, module in layer.named_children():
        is_replaced = "forward" in vars(module) and not _is_compiled(module)
        if ("norm" in name or name == "mlp") and not is_replaced:
            yield module


def _is_compiled(module: Any) -> bool:
    own_forward = vars(module).get("forward")
    return getattr(own_forward, "__func__", None) is _forward


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a module whose class is compiled."""
    module_class: Any = type(module)
    forward = _compiled(module_class) if module.training else module_class.forward
    return forward(module, *args, **kwargs)


@functools.cache
def _compiled(module_class: Any) -> Callable[..., Any]:
    """Return the compiled `forward` of a class. All layers call one function, which compiles once for all of them."""
    import torch

    compiled: Callable[..., Any] = torch.compile(module_class.forward, dynamic=True)
    return compiled


def _compiler_obstacle(base: Any, layer: Any) -> str:
    """Return why the norms and the MLP of a layer cannot be compiled with their gradient, or ""."""
    import torch

    # `torch.compile` reads both, and then returns the function as it is, without a word.
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is disabled (TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE), which vLLM needs on a CPU"

    embeddings = base.get_input_embeddings().weight
    hidden_size = base.config.get_text_config().hidden_size
    hidden_states = torch.ones(1, _PROBE_TOKENS, hidden_size, dtype=embeddings.dtype, device=embeddings.device)
    hidden_states.requires_grad_(True)

    was_training = layer.training
    layer.train()
    try:
        with torch.enable_grad():
            for module in _norms_and_mlp(layer):
                module_class: Any = type(module)
                output = _compiled(module_class)(module, hidden_states)
                torch.autograd.grad(output.sum(), hidden_states)
    except (RuntimeError, ImportError) as error:  # no C++ compiler, no Triton, code that cannot be traced
        return first_line(error)
    finally:
        layer.train(was_training)
    return ""
