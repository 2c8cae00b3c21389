"""The bytes that parameters take: the base model in 4 or 16 bits, and the optimizer's state of an adapter.

tests/memory/test_estimate.py compares them, byte for byte, with what bitsandbytes and torch store.
"""

import math

from lora_grpo.memory.shape import Shape

_NF4_BLOCK = 64
"""Weights of NF4 that share a scale (bitsandbytes)."""
_NF4_LEVELS = 16
"""Float32 entries of the table that an NF4 matrix has."""
_SCALE_BLOCK = 256
"""Quantized scales that share one float32 scale. Also the elements of an 8-bit optimizer state that share one."""
_SCALE_LEVELS = 256
"""Float32 entries of the table of quantized scales."""
_LEAST_8BIT_ELEMENTS = 4096
"""The 8-bit optimizers of bitsandbytes keep the states of smaller tensors in 32 bits."""


def weight_bytes(shape: Shape, bits: int, *, double_quantized: bool = True, float_bytes: int = 2) -> int:
    """Return the size of the base model.

    NF4 uses half a byte per parameter and one scale per 64 parameters. Double quantization stores each scale in one
    byte, plus one float32 per 256 scales; vLLM dequantizes the scales to float32. Each matrix also has a table of 16
    levels and, if its scales are quantized, one of their 256 levels and an offset.

    Args:
        bits: 4 or 16, of a weight of a linear layer.
        double_quantized: whether the scales of NF4 are quantized too.
        float_bytes: bytes of a parameter that is not quantized.

    Returns:
        The size in bytes.
    """
    if bits == 16:
        return float_bytes * shape.parameters
    quantized_bytes = 0
    for weights, matrices in shape.matrix_counts.items():
        scales = math.ceil(weights / _NF4_BLOCK)
        if double_quantized:
            scale_bytes = scales + 4 * math.ceil(scales / _SCALE_BLOCK) + 4 * (_SCALE_LEVELS + 1)
        else:
            scale_bytes = 4 * scales
        quantized_bytes += matrices * (math.ceil(weights / 2) + scale_bytes + 4 * _NF4_LEVELS)
    return quantized_bytes + float_bytes * shape.other_parameters


def optimizer_bytes(elements: int, name: str) -> int:
    """Return the size of the optimizer state of one tensor, in bytes: two moments, or none for SGD.

    The 8-bit optimizers of bitsandbytes use 32-bit states for small tensors, and one float32 scale per 256 elements of
    larger ones.
    """
    if name == "sgd":
        return 0
    if "8bit" not in name or elements < _LEAST_8BIT_ELEMENTS:
        return 2 * 4 * elements
    return 2 * (elements + 4 * math.ceil(elements / _SCALE_BLOCK))
