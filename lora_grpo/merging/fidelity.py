"""Measure how much of an adapter's update survives the rounding of the merged weights.

A bfloat16 weight has eight significant bits, so an update smaller than half of the last bit is lost. Let D be the
update, W the base, and W' the rounded merge:

    retained = <W' - W, D> / |D|^2       1 keeps all of D, 0 keeps none
    error    = |W' - W - D| / |D|        rounding error relative to D

`--dtype auto` uses `retained`. Greedy answers are not a reliable test: they can match even if half of the update is
lost.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from lora_grpo.errors import UserError
from lora_grpo.files import DTYPES, row_blocks
from lora_grpo.merging.mapping import MergePlan
from lora_grpo.merging.outputs import Output
from lora_grpo.merging.report import Dtype, Retained, percent

STORED = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Map a dtype to its safetensors name."""
ENOUGH = 0.99
"""The fraction of the update that `auto` must keep."""
LARGEST_FP16 = 65504.0
SAMPLE_ELEMENTS = 2**18
"""Number of elements to measure per tensor; see docs/decisions/0009-merge.md."""


def choose(requested: Dtype | Literal["auto"], plan: MergePlan) -> tuple[Dtype, str, Retained | None]:
    """Return the requested dtype or, for `auto`, the smallest that keeps ENOUGH of the update; why; and what it keeps.

    `auto` never chooses bfloat16 for a float16 base, because that would round the base itself.

    Raises:
        UserError: fp16 was requested and a weight exceeds its range.
    """
    if requested != "auto":
        if requested == "fp16" and (name := _too_large(plan.outputs)):
            raise UserError(f"{name} does not fit fp16's range of ±65504; pass --dtype bf16, fp32 or auto")
        return requested, f"{requested}, as requested", measure(plan.outputs, requested)
    reasons = []
    candidates: list[Dtype] = ["fp16"] if plan.base_dtype == "F16" else ["bf16", "fp16"]
    for dtype in candidates:
        retained = measure(plan.outputs, dtype)
        if retained is None:
            return dtype, "the adapter changes nothing", None
        reasons.append(f"{dtype} keeps {percent(retained.overall)} of the update")
        if retained.overall < ENOUGH:
            continue
        if dtype == "fp16" and (name := _too_large(plan.outputs)):
            reasons.append(f"{name} does not fit fp16's range")
            continue
        return dtype, "; ".join(reasons), retained
    return "fp32", "; ".join([*reasons, "only fp32 keeps it"]), measure(plan.outputs, "fp32")


def measure(outputs: Mapping[str, Output], dtype: Dtype) -> Retained | None:
    """Measure how much of the update a dtype keeps, in one block of each tensor that a low-rank update changes.

    None if the adapter changes nothing.

    Raises:
        UserError: the adapter has a NaN or infinite weight.
    """
    import torch

    # <W' - W - D, D>, |D|^2 and |W' - W - D|^2 of every layer.
    layers: dict[str, tuple[float, float, float]] = {}
    for name, output in outputs.items():
        if not output.low_rank:
            continue
        blocks = list(row_blocks(output.shape, SAMPLE_ELEMENTS))
        start, stop = blocks[(len(blocks) - 1) // 2]
        base = output.base.rows(start, stop).float()
        change = output.low_rank.change(start, stop, base)
        squares = _dot(change, change)
        if not math.isfinite(squares):
            raise UserError(f"the adapter's update of {name} is NaN or infinite; train the adapter again")
        error = (base + change).to(getattr(torch, DTYPES[STORED[dtype]]))
        if dtype == "fp16":  # `_too_large` checks the range; an infinity would invalidate all values here
            error.nan_to_num_()
        error = error.float() - base
        error -= change
        weight = output.shape[0] / (stop - start)
        # Python's numbers: small tensors would fragment the heap between large ones.
        layers[name] = weight * _dot(error, change), weight * squares, weight * _dot(error, error)
    shares = {name: 1 + dot / squares for name, (dot, squares, _) in layers.items() if squares}
    if not shares:
        return None
    dot, squares, errors = map(sum, zip(*layers.values(), strict=True))
    layer, worst = min(shares.items(), key=lambda share: share[1])
    return Retained(overall=1 + dot / squares, error=math.sqrt(errors / squares), worst=worst, worst_layer=layer)


def _dot(first: Any, second: Any) -> float:
    import torch

    return float(torch.dot(first.reshape(-1), second.reshape(-1)))


def _too_large(outputs: Mapping[str, Output]) -> str | None:
    for name, output in outputs.items():
        blocks = row_blocks(output.shape) if output.shape else ()
        if any(float(output.rows(*rows).abs().max()) > LARGEST_FP16 for rows in blocks):
            return name
    return None
