"""What the memory of a teacher depends on: an adapter on the base of the run, or a base of its own."""

from dataclasses import dataclass

from lora_grpo.memory.parameters import weight_bytes
from lora_grpo.memory.shape import Shape


@dataclass(frozen=True)
class TeacherSize:
    """The size of a teacher."""

    shape: Shape
    """The dimensions of its base."""
    own_bits: int | None
    """Bits per weight of its own base; None if its base is that of the run."""
    adapter_parameters: int
    """Number of parameters of its adapter; 0 without one."""

    def weights(self, float_bytes: int) -> int:
        """Return the bytes of what the teacher adds to the model: its adapter in float32, and its own base.

        Args:
            float_bytes: bytes of a parameter of the base that is not quantized.
        """
        total = 4 * self.adapter_parameters
        if self.own_bits is not None:
            total += weight_bytes(self.shape, self.own_bits, float_bytes=float_bytes)
        return total
