"""The limits of a GPU (memory bandwidth and matmul throughput), and the resulting bounds for a GRPO step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lora_grpo.models import Shape, memory

_SECONDS = 0.5
"""Minimum time of each measurement."""


@dataclass(frozen=True)
class Limits:
    """Memory bandwidth and matmul throughput of one GPU."""

    copy_gb_per_second: float
    """Bytes read and written by a device-to-device copy, in 1e9 per second."""
    matmul_tflops: float
    """Operations of a large matrix product in the training precision, in 1e12 per second."""


_PUBLISHED = {
    # Pattern for the name reported by nvidia-smi: GB/s, TFLOPS. The first match is used.
    r"\bH200 NVL": (4800, 835),
    r"\bH200": (4800, 989),
    r"H100 NVL": (3900, 835),
    r"H100 PCIe": (2000, 756),
    r"H100": (3350, 989),
    r"A100-SXM4-80GB": (2039, 312),
    r"A100 80GB PCIe": (1935, 312),
    r"A100": (1555, 312),
    r"L40S": (864, 362),
    r"L4\b": (300, 121),
    r"A10\b": (600, 125),
    r"T4\b": (320, 65),
    r"RTX A6000": (768, 154.8),
    r"RTX 6000 Ada": (960, 364),
    r"RTX 5090\b(?! (D|Laptop))": (1792, 209.5),
    r"RTX 5080\b(?! Laptop)": (960, 112.6),
    r"RTX 5070 Ti\b(?! Laptop)": (896, 87.9),
    r"RTX 5070\b(?! Laptop)": (672, 61.7),
    r"RTX 4090\b(?! (D|Laptop))": (1008, 165.2),
    r"RTX 4080 SUPER": (736, 104.4),
    r"RTX 4080\b(?! Laptop)": (717, 97.5),
    r"RTX 4070 Ti\b(?! SUPER)": (504, 80.2),
    r"RTX 4070\b(?! (SUPER|Ti|Laptop))": (504, 58.3),
    r"RTX 4060 Ti\b": (288, 44.1),
    r"RTX 4060\b(?! (Ti|Laptop))": (272, 30.2),
    r"RTX 3090\b(?! Ti)": (936, 71.2),
    r"RTX 3080\b(?! (Ti|Laptop))": (760, 59.5),
    r"RTX 3070\b(?! (Ti|Laptop))": (448, 40.6),
    r"RTX 3060\b(?! (Ti|Laptop))": (360, 25.5),
}
"""Memory bandwidth and dense 16-bit matmul throughput with float32 accumulation, without sparsity.

Source: NVIDIA's data sheets (T4, L4, L40S, A10, A100, H100, H200, RTX A6000, RTX 6000 Ada) and the whitepapers of
Turing, Ampere GA102, Ada and RTX Blackwell. GeForce matmul throughput is twice the float32 shader rate.
"""


def published_limits(gpu: str) -> Limits | None:
    """Return the published rates of a GPU by its name in nvidia-smi; None if it is not in the table."""
    return next((Limits(*rates) for pattern, rates in _PUBLISHED.items() if re.search(pattern, gpu)), None)


def measure(size: int | None = None) -> dict[str, Any]:
    """Measure the fields of `Limits` on this machine's GPU or CPU. `size` is the side of the square matrices."""
    import torch
    from torch.utils.benchmark import Timer

    from lora_grpo.models import base_model

    on_gpu, dtype = torch.cuda.is_available(), base_model.compute_dtype()
    device = torch.device("cuda" if on_gpu else "cpu")

    def seconds(statement: str, **names: Any) -> float:
        timer = Timer(statement, globals={"torch": torch, **names}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=_SECONDS).median

    size = size or (8192 if on_gpu else 512)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    product = seconds("torch.matmul(left, right, out=out)", left=left, right=right, out=out)
    block = min(16 * left.nbytes, torch.cuda.mem_get_info()[0] // 3) if on_gpu else 16 * left.nbytes
    source = torch.ones(block, dtype=torch.uint8, device=device)
    copy = seconds("target.copy_(source)", source=source, target=torch.empty_like(source))
    return {
        "copy_gb_per_second": round(2 * block / copy / 1e9, 1),
        "matmul_tflops": round(2 * size**3 / product / 1e12, 3),
        "precision": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if on_gpu else None,
        "cuda": torch.version.cuda,
    }


@dataclass(frozen=True)
class StepWork:
    """The computation of an optimizer step, estimated from the model's shape."""

    shape: Shape
    completions: int
    """Completions sampled in parallel and trained on."""
    prompt_tokens: float
    completion_tokens: float
    """Mean lengths."""
    bits: int
    """Bits per weight of the base model's linear layers: 4 (NF4) or 16."""
    rank: int
    """LoRA rank, on all linear layers."""
    recomputes: bool
    """Whether the backward pass repeats the forward pass (gradient checkpointing)."""

    def decoding_bound(self, limits: Limits) -> float:
        """Return the upper bound of the sampling speed, in tokens per second.

        Each decoding step reads the weights once and the KV caches of all completions. With many completions, the
        matrix products take longer than these reads.
        """
        shape, context = self.shape, self.prompt_tokens + self.completion_tokens / 2
        read: float = memory.weight_bytes(shape, self.bits) + 2 * self._adapter
        read += self.completions * context * memory.kv_bytes_per_token(shape.layers, shape.keys)
        products = 2 * (shape.active_parameters + self._head + self._adapter)
        attention = 4 * context * shape.queries * shape.layers
        seconds = max(
            read / (limits.copy_gb_per_second * 1e9),
            self.completions * (products + attention) / (limits.matmul_tflops * 1e12),
        )
        return self.completions / seconds

    def training_operations(self) -> float:
        """Return the operations of the forward and backward passes over all prompts and completions.

        The base model is frozen, so its layers compute gradients only for their inputs.
        """
        shape, length = self.shape, self.prompt_tokens + self.completion_tokens
        passes = 2 + self.recomputes
        base = 2 * passes * shape.active_parameters * length
        adapter = 2 * (passes + 1) * self._adapter * length
        attention = (passes + 1) * 2 * length**2 * shape.queries * shape.layers
        head = 4 * self._head * self.completion_tokens
        return self.completions * (base + adapter + attention + head)

    def training_share(self, seconds: float, limits: Limits) -> float:
        """Return the share of the matmul throughput that a training phase of this many seconds reaches."""
        return self.training_operations() / seconds / (limits.matmul_tflops * 1e12)

    @property
    def _adapter(self) -> int:
        return sum(self.shape.adapter_tensors(self.rank))

    @property
    def _head(self) -> int:
        return self.shape.vocabulary * self.shape.hidden
