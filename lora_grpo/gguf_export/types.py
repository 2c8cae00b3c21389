"""The types a GGUF's tensors can have: which tensor gets which, and weights turned into them by the gguf package.

Norms, biases and other vectors stay F32, as llama.cpp reads them. Of the 4-bit and 5-bit types the token embedding and
the output stay Q8_0: llama.cpp keeps them at Q6_K, since they hurt most when they are rounded, and the gguf package
cannot make K-quants. A matrix whose rows do not divide into blocks of 32 becomes F16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import StoredTensor, row_blocks

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""What the gguf package makes."""
QUANTIZE_TYPES = ("q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_m", "q2_k", "iq4_xs")
"""What llama.cpp's `llama-quantize` makes of a 16-bit file."""

BLOCK = 32
"""Weights that share a scale, in every quantised type of `TYPES`."""
LARGEST_F16 = 65504.0


def tensor_type(wanted: str, name: str, shape: tuple[int, ...]) -> str:
    """Return the type of one tensor of a file of type `wanted`.

    Args:
        wanted: one of `TYPES`.
        name: of the tensor in the GGUF.
        shape: rows first.
    """
    if len(shape) < 2:
        return "f32"
    if not wanted.startswith("q"):
        return wanted
    if shape[-1] % BLOCK:
        return "f16"
    return "q8_0" if name in ("token_embd.weight", "output.weight") else wanted


def num_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor takes in a file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return math.prod(shape) // block * size


def encoded(source: StoredTensor, kind: str, heads: int | None) -> Iterator[Any]:
    """Return a stored tensor in a type, as NumPy arrays of some rows each.

    Args:
        source: the tensor.
        kind: one of `TYPES`.
        heads: attention heads whose halves are to be interleaved, or None.

    Raises:
        UserError: a weight is no number, or too large for the type.
    """
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    # Heads are put in order whole; every other tensor goes through memory a few rows at a time.
    pieces = [(0, source.shape[0])] if heads else row_blocks(source.shape)
    for start, stop in pieces:
        values = np.ascontiguousarray(source.rows(start, stop).float().numpy())
        largest = float(np.abs(values).max(initial=0.0))
        if not np.isfinite(largest):  # NaN is the largest of everything
            raise UserError(f"{source.name} holds NaN or infinity; train or merge again, it cannot be exported")
        if largest > LARGEST_F16 and kind not in ("f32", "bf16"):
            raise UserError(
                f"{source.name} holds {largest:.3g}, more than the {LARGEST_F16:.0f} of 16-bit floats that {kind} is "
                "made of; pass --type bf16"
            )
        if heads:
            values = interleaved(values, heads)
        yield quantize(values, GGMLQuantizationType[kind.upper()])


def interleaved(values: Any, heads: int) -> Any:
    """Put a head's rows in the order of Meta's checkpoints, as llama.cpp rotates them: 0, d/2, 1, d/2 + 1, ...

    Hugging Face turns row i together with row i + d/2, `llama` in llama.cpp row 2i with 2i + 1.
    """
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
