"""Choose the GGUF type of each tensor, and convert tensors with the gguf package.

Norms, biases, and other vectors are F32, which llama.cpp requires. In 4-bit and 5-bit files, the token embedding and
the output are Q8_0, because they are the most sensitive to rounding and the gguf package does not support llama.cpp's
Q6_K. A matrix becomes F16 if its row width is not a multiple of 32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

from lora_grpo.errors import UserError
from lora_grpo.files import row_blocks
from lora_grpo.gguf.architecture import Tensor

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

DirectType = Literal["q8_0", "f16", "bf16", "f32", "q5_1", "q5_0", "q4_1", "q4_0"]
"""Types that the gguf package converts to, without llama.cpp."""
QuantizeType = Literal["q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_m", "q2_k", "iq4_xs"]
"""Types that llama.cpp's `llama-quantize` makes from a 16-bit file."""
TypeName = Literal[DirectType, QuantizeType]
DIRECT_TYPES = get_args(DirectType)
LARGEST_F16 = 65504.0
_BLOCK_WIDTH = 32
"""Number of weights of a row that share a scale in the types from Q4_0 to Q8_0."""


@dataclass(frozen=True)
class Encoded:
    """A tensor in a file of one type. GGUFWriter treats it as an array, and it is converted while it is written."""

    tensor: Tensor
    kind: GGMLQuantizationType
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor, file_type: str) -> Encoded:
        """Return a tensor as it is in a file of type `file_type`, one of DIRECT_TYPES."""
        from gguf import GGMLQuantizationType
        from gguf.quants import quant_shape_to_byte_shape

        shape = tensor.source.shape
        is_quantized = file_type.startswith("q")
        kind = GGMLQuantizationType[file_type.upper()]
        if len(shape) < 2:
            kind = GGMLQuantizationType.F32
        elif is_quantized and shape[-1] % _BLOCK_WIDTH:
            kind = GGMLQuantizationType.F16
        elif is_quantized and tensor.name in ("token_embd.weight", "output.weight"):
            kind = GGMLQuantizationType.Q8_0
        return cls(tensor, kind, nbytes=math.prod(quant_shape_to_byte_shape(shape, kind)))

    def tofile(self, file: IO[bytes]) -> None:
        """Convert and write a few rows at a time.

        Raises:
            UserError: a weight is NaN, infinite, or too large for the type.
        """
        import numpy as np
        from gguf.quants import quantize

        source = self.tensor.source
        heads = self.tensor.heads
        # Interleaving moves rows within each head, so a tensor with heads is one block.
        blocks = [(0, source.shape[0])] if heads else row_blocks(source.shape)
        for start, stop in blocks:
            values: Any = np.ascontiguousarray(source.rows(start, stop).float().numpy())
            self._check_range(float(np.abs(values).max(initial=0.0)))
            if heads:
                values = _interleaved(values, heads)
            encoded: Any = quantize(values, self.kind)
            file.write(memoryview(encoded).cast("B"))  # NumPy's tofile does not report a full disk

    def _check_range(self, largest: float) -> None:
        """Raise a UserError if the largest absolute value of some rows does not fit. It is NaN if any value is."""
        name = self.tensor.source.name
        if not math.isfinite(largest):
            raise UserError(f"{name} contains NaN or infinity; train or merge again")
        if largest > LARGEST_F16 and self.kind.name not in ("F32", "BF16"):
            raise UserError(
                f"{name} has {largest:.3g}, and {self.kind.name} is limited to {LARGEST_F16:.0f}; pass --type bf16"
            )


def _interleaved(values: Any, heads: int) -> Any:
    """Return the rows of a query or key projection in the order of llama.cpp's `llama`.

    With d rows in each head, its rotary embedding turns rows 2i and 2i + 1 together; that of Hugging Face, i and
    i + d/2.
    """
    half = values.shape[0] // heads // 2
    halves = values.reshape(heads, 2, half, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
