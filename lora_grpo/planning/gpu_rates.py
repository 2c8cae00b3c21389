"""What NVIDIA says its GPUs can do, for an estimate of a run's time: memory bandwidth and dense 16-bit matrix rate.

Source: NVIDIA's data sheets (T4, L4, L40S, A10, A100, H100, H200, RTX A6000, RTX 6000 Ada) and the whitepapers of
Turing, Ampere GA102, Ada and RTX Blackwell. Matrix rates are those of tensor cores without sparsity that add in
float32, which training does; on GeForce cards they are twice the float32 rate of the shaders.
"""

from __future__ import annotations

import re

from lora_grpo.planning.roofline import Limits

_RATES: tuple[tuple[str, float, float], ...] = (
    # As nvidia-smi calls them; the first that is found in the name.
    (r"\bH200 NVL", 4800, 835),
    (r"\bH200", 4800, 989),
    (r"H100 NVL", 3900, 835),
    (r"H100 PCIe", 2000, 756),
    (r"H100", 3350, 989),
    (r"A100-SXM4-80GB", 2039, 312),
    (r"A100 80GB PCIe", 1935, 312),
    (r"A100", 1555, 312),
    (r"L40S", 864, 362),
    (r"L4\b", 300, 121),
    (r"A10\b", 600, 125),
    (r"T4\b", 320, 65),
    (r"RTX A6000", 768, 154.8),
    (r"RTX 6000 Ada", 960, 364),
    (r"RTX 5090\b(?! (D|Laptop))", 1792, 209.5),
    (r"RTX 5080\b(?! Laptop)", 960, 112.6),
    (r"RTX 5070 Ti\b(?! Laptop)", 896, 87.9),
    (r"RTX 5070\b(?! Laptop)", 672, 61.7),
    (r"RTX 4090\b(?! (D|Laptop))", 1008, 165.2),
    (r"RTX 4080 SUPER", 736, 104.4),
    (r"RTX 4080\b(?! Laptop)", 717, 97.5),
    (r"RTX 4070 Ti\b(?! SUPER)", 504, 80.2),
    (r"RTX 4070\b(?! (SUPER|Ti|Laptop))", 504, 58.3),
    (r"RTX 4060 Ti\b", 288, 44.1),
    (r"RTX 4060\b(?! (Ti|Laptop))", 272, 30.2),
    (r"RTX 3090\b(?! Ti)", 936, 71.2),
    (r"RTX 3080\b(?! (Ti|Laptop))", 760, 59.5),
    (r"RTX 3070\b(?! (Ti|Laptop))", 448, 40.6),
    (r"RTX 3060\b(?! (Ti|Laptop))", 360, 25.5),
)


def rates_of(name: str) -> Limits | None:
    """Return the rates of a GPU by the name that nvidia-smi gives it; None where it is not in the table."""
    for pattern, bandwidth, tflops in _RATES:
        if re.search(pattern, name):
            return Limits(bandwidth, tflops)
    return None
