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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype of a merged model."""

    dtype: Dtype
    reason: str
    """Why it was chosen, for the report."""
    retained: Retained | None
    """How much of the update the dtype keeps; None if the adapter changes nothing."""


def choose(requested: Dtype | Literal["auto"], plan: MergePlan) -> DtypeChoice:
    """Return the requested dtype or, for `auto`, the smallest that keeps ENOUGH of the update.

    `auto` never chooses bfloat16 for a float16 base, because that would round the base itself.

    Raises:
        UserError: fp16 was requested and a weight exceeds its range.
    """
    if requested != "auto":
        too_large = _too_large(plan.outputs) if requested == "fp16" else None
        if too_large:
            raise UserError(f"{too_large} does not fit fp16's range of ±65504; pass --dtype bf16, fp32 or auto")
        return DtypeChoice(requested, f"{requested}, as requested", measure(plan.outputs, requested))

    candidates: list[Dtype] = ["fp16"] if plan.base_dtype == "F16" else ["bf16", "fp16"]
    reasons = []
    for dtype in candidates:
        retained = measure(plan.outputs, dtype)
        if retained is None:
            return DtypeChoice(dtype, "the adapter changes nothing", None)
        reasons.append(f"{dtype} keeps {percent(retained.overall)} of the update")
        if retained.overall < ENOUGH:
            continue
        too_large = _too_large(plan.outputs) if dtype == "fp16" else None
        if too_large:
            reasons.append(f"{too_large} does not fit fp16's range")
            continue
        return DtypeChoice(dtype, "; ".join(reasons), retained)
    reasons.append("only fp32 keeps it")
    return DtypeChoice("fp32", "; ".join(reasons), measure(plan.outputs, "fp32"))


@dataclass(frozen=True)
class _Rounding:
    """Sums over the elements of a tensor, with its update D and its rounding error E = W' - W - D.

    The sums are Python floats, because small tensors would fragment the heap between large ones.
    """

    error_dot_update: float
    """<E, D>"""
    update_squared: float
    """|D|^2"""
    error_squared: float
    """|E|^2"""


def measure(outputs: Mapping[str, Output], dtype: Dtype) -> Retained | None:
    """Measure how much of the update a dtype keeps, in one block of each tensor that a low-rank update changes.

    Returns:
        None if the adapter changes nothing.

    Raises:
        UserError: the adapter has a NaN or infinite weight.
    """
    roundings = {name: _measure_block(output, dtype) for name, output in outputs.items() if output.low_rank}

    # retained = <D + E, D> / |D|^2 = 1 + <E, D> / |D|^2, of each layer and of all layers together.
    retained_of = {}
    for name, sums in roundings.items():
        if sums.update_squared:
            retained_of[name] = 1 + sums.error_dot_update / sums.update_squared
    if not retained_of:
        return None
    error_dot_update = sum(sums.error_dot_update for sums in roundings.values())
    update_squared = sum(sums.update_squared for sums in roundings.values())
    error_squared = sum(sums.error_squared for sums in roundings.values())
    worst_layer = min(retained_of, key=lambda name: retained_of[name])
    return Retained(
        overall=1 + error_dot_update / update_squared,
        error=math.sqrt(error_squared / update_squared),
        worst=retained_of[worst_layer],
        worst_layer=worst_layer,
    )


def _measure_block(output: Output, dtype: Dtype) -> _Rounding:
    """Round the middle block of an output's rows, and scale the sums to the whole tensor."""
    import torch

    blocks = list(row_blocks(output.shape, SAMPLE_ELEMENTS))
    start, stop = blocks[(len(blocks) - 1) // 2]
    base = output.base.rows(start, stop).float()
    assert output.low_rank is not None
    change = output.low_rank.change(start, stop, base)
    change_squared = _dot(change, change)
    if not math.isfinite(change_squared):
        raise UserError(f"the adapter's update of {output.name} is NaN or infinite; train the adapter again")

    # In place, because a block of a large tensor is a copy of megabytes.
    error = (base + change).to(getattr(torch, DTYPES[STORED[dtype]]))
    if dtype == "fp16":  # `_too_large` checks the range; an infinity would invalidate all values here
        error.nan_to_num_()
    error = error.float() - base
    error -= change
    weight = output.shape[0] / (stop - start)
    return _Rounding(
        error_dot_update=weight * _dot(error, change),
        update_squared=weight * change_squared,
        error_squared=weight * _dot(error, error),
    )


def _dot(first: Any, second: Any) -> float:
    import torch

    return float(torch.dot(first.reshape(-1), second.reshape(-1)))


def _too_large(outputs: Mapping[str, Output]) -> str | None:
    """Return the first tensor with a merged weight that exceeds fp16's range, or None."""
    for name, output in outputs.items():
        if not output.shape:  # a scalar keeps its dtype
            continue
        for start, stop in row_blocks(output.shape):
            if float(output.rows(start, stop).abs().max()) > LARGEST_FP16:
                return name
    return None
