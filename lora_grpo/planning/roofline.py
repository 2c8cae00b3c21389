"""What a card can do at most: its memory bandwidth and matrix rate, measured, and what follows for a step of GRPO."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lora_grpo.models import Shape, memory

_SECONDS = 0.5
"""Each rate is measured for about this long."""


@dataclass(frozen=True)
class Limits:
    """Rates of one card."""

    copy_gb_per_second: float
    """Bytes read and written by a device-to-device copy, 1e9 a second."""
    matmul_tflops: float
    """Of a large matrix product in the precision that training has, 1e12 operations a second."""


def measure(size: int | None = None) -> dict[str, Any]:
    """Measure the card's rates; on a machine without one, the CPU's.

    Args:
        size: side of the square matrices; None is 8192, on a CPU 512. The copied block has sixteen times their bytes,
            up to a third of what is free.

    Returns:
        The fields of `Limits`, and the device's name, precision and versions that were measured.
    """
    import torch

    from lora_grpo.models import base_model

    on_gpu, dtype = torch.cuda.is_available(), base_model.compute_dtype()
    device = torch.device("cuda" if on_gpu else "cpu")
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else (lambda: None)
    size = size or (8192 if on_gpu else 512)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = _seconds_each(lambda: torch.matmul(left, right, out=out), wait)
    tflops = 2 * size**3 / seconds / 1e12
    block = 16 * left.nbytes
    if on_gpu:
        block = min(block, torch.cuda.mem_get_info()[0] // 3)
    read = torch.ones(block, dtype=torch.uint8, device=device)
    written = torch.empty_like(read)
    seconds = _seconds_each(lambda: written.copy_(read), wait)
    return {
        "copy_gb_per_second": round(2 * block / seconds / 1e9, 1),
        "matmul_tflops": round(tflops, 3),
        "precision": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if on_gpu else None,
        "cuda": torch.version.cuda,
    }


def _seconds_each(work: Callable[[], object], wait: Callable[[], object]) -> float:
    """Return the time of one call, from as many as fit into the time for it, after one that does not count."""
    work()
    wait()
    started = time.perf_counter()
    work()
    wait()
    times = max(1, int(_SECONDS / max(time.perf_counter() - started, 1e-6)))
    started = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - started) / times


@dataclass(frozen=True)
class StepWork:
    """What one optimisation step computes, as far as the model's shape says."""

    shape: Shape
    completions: int
    """Decoded side by side, and trained on."""
    prompt_tokens: float
    """Mean length."""
    completion_tokens: float
    """Mean length."""
    bits: int
    """Of the base's linear layers: 4 (NF4) or 16."""
    rank: int
    """Of the adapter, on every linear layer."""
    recomputes: bool
    """Whether the forward pass is computed again in the backward pass."""

    def decoding_bound(self, limits: Limits) -> float:
        """Return the most tokens a second that decoding can reach.

        For each token of all completions, the weights are read once, and keys and values as far as they go; or the
        products take longer.
        """
        shape, context = self.shape, self.prompt_tokens + self.completion_tokens / 2
        read: float = memory.weight_bytes(shape, self.bits) + 2 * self._adapter
        read += self.completions * context * memory.kv_bytes_per_token(shape.layers, shape.keys)
        products = 2 * (shape.linear_parameters + self._head + self._adapter)
        attention = 4 * context * shape.queries * shape.layers
        seconds = max(
            read / (limits.copy_gb_per_second * 1e9),
            self.completions * (products + attention) / (limits.matmul_tflops * 1e12),
        )
        return self.completions / seconds

    def training_operations(self) -> float:
        """Return the operations of the forward and backward passes over all completions with their prompts.

        The base is frozen: backward, its layers have the gradient of their input alone.
        """
        shape, length = self.shape, self.prompt_tokens + self.completion_tokens
        passes = 2 + self.recomputes
        base = 2 * passes * shape.linear_parameters * length
        adapter = 2 * (passes + 1) * self._adapter * length
        attention = (passes + 1) * 2 * length**2 * shape.queries * shape.layers
        head = 4 * self._head * self.completion_tokens
        return self.completions * (base + adapter + attention + head)

    def training_share(self, seconds: float, limits: Limits) -> float:
        """Return which share of the measured matrix rate training reached."""
        return self.training_operations() / seconds / (limits.matmul_tflops * 1e12)

    @property
    def _adapter(self) -> int:
        return sum(self.shape.adapter_tensors(self.rank))

    @property
    def _head(self) -> int:
        return self.shape.vocabulary * self.shape.hidden
