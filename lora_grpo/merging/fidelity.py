"""How much of an adapter's update survives the rounding of the merged weights.

A bfloat16 weight has eight significant bits: an update below half of the last one rounds away. With D the update, W the
base and W' the rounded merge,

    retained = <W' - W, D> / |D|^2       1 keeps all of D, 0 none of it
    error    = |W' - W - D| / |D|        what rounding adds, relative to D

`--dtype auto` decides by `retained`. Greedy answers agree long after half of an update is gone; they prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lora_grpo.errors import UserError
from lora_grpo.files import row_blocks
from lora_grpo.merging.mapping import Plan
from lora_grpo.merging.outputs import Output, is_finite
from lora_grpo.merging.report import Dtype, Retained, percent

TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
STORED = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
ENOUGH = 0.99
"""The share of the update that `auto` requires."""
LARGEST_FP16 = 65504.0


@dataclass(frozen=True)
class Choice:
    """The dtype of the merged weights."""

    dtype: Dtype
    reason: str
    measured: dict[Dtype, Retained]
    """What this dtype and the rejected ones keep."""


def choose(requested: Dtype | Literal["auto"], plan: Plan) -> Choice:
    """Choose the requested dtype, or for `auto` the smallest that keeps ENOUGH of the update.

    A float16 base is never rounded to bfloat16 by `auto`: that would round the base itself.

    Raises:
        UserError: fp16 was requested and a weight exceeds its range.
    """
    if requested != "auto":
        if requested == "fp16" and (name := _too_large(plan.outputs)):
            raise UserError(f"{name} does not fit fp16's range of ±65504; pass --dtype bf16, fp32 or auto")
        return Choice(requested, f"{requested}, as requested", measure(plan.outputs, [requested]))
    measured = measure(plan.outputs, ["fp16"] if plan.base_dtype == "F16" else ["bf16", "fp16"])
    reasons = []
    for dtype, retained in measured.items():
        if retained.overall is None:
            return Choice(dtype, "the adapter changes nothing", measured)
        reasons.append(f"{dtype} keeps {percent(retained.overall)} of the update")
        if retained.overall < ENOUGH:
            continue
        if dtype == "fp16" and (name := _too_large(plan.outputs)):
            reasons.append(f"{name} does not fit fp16's range")
            continue
        return Choice(dtype, "; ".join(reasons), measured)
    return Choice("fp32", "; ".join([*reasons, "only fp32 holds it"]), measured | measure(plan.outputs, ["fp32"]))


def measure(outputs: Mapping[str, Output], dtypes: Sequence[Dtype]) -> dict[Dtype, Retained]:
    """Measure what each dtype keeps of the update, in one pass over the weights.

    Tensors whose shape differs from the base's have no update to keep and are left out.
    """
    import torch

    sums: dict[Dtype, dict[str, Any]] = {dtype: {} for dtype in dtypes}
    for name, output in outputs.items():
        if not output.changed or output.base.shape != output.shape:
            continue
        for rows in row_blocks(output.shape):
            merged, base, change = output.rows_and_change(*rows)
            for dtype, layers in sums.items():
                difference = merged.to(getattr(torch, TORCH[dtype])).float().sub_(base)
                if dtype == "fp16":  # `_too_large` judges the range; an infinity would spoil every figure here
                    difference.nan_to_num_()
                dot = (difference * change).sum(dim=-1).double().sum()
                block = torch.stack([dot, _square(change), _square(difference.sub_(change))])
                layers[name] = layers.get(name, 0) + block
    return {dtype: _retained(layers) for dtype, layers in sums.items()}


def _square(matrix: Any) -> Any:
    """Return the sum of squares, summed in float32 along a row and in float64 over rows."""
    import torch

    return torch.linalg.vector_norm(matrix, dim=-1).double().square().sum()


def _retained(layers: Mapping[str, Any]) -> Retained:
    """Return the figures of one dtype from (<W' - W, D>, |D|^2, |W' - W - D|^2) of every layer."""
    shares = {name: float(dot / squares) for name, (dot, squares, _) in layers.items() if squares}
    if not shares:
        return Retained(overall=None, error=None, worst=None, worst_layer=None)
    dot, squares, errors = map(float, sum(layers.values()))
    worst = min(shares, key=lambda name: shares[name])
    return Retained(overall=dot / squares, error=math.sqrt(errors / squares), worst=shares[worst], worst_layer=worst)


def _too_large(outputs: Mapping[str, Output]) -> str | None:
    """Return the name of a tensor that exceeds float16's range, or None."""
    for name, output in outputs.items():
        blocks = row_blocks(output.shape) if output.shape else ()
        if any(float(output.rows(*rows).abs().max()) > LARGEST_FP16 for rows in blocks):
            return name
    return None


def check_finite(outputs: Mapping[str, Output]) -> None:
    """Check the adapter for NaN and infinity before anything is written.

    Raises:
        UserError: names the first such tensor.
    """
    for output in outputs.values():
        parts = [output.replacement, output.tokens and output.tokens[0], output.bias and output.bias[0]]
        if output.low_rank:
            parts += [output.low_rank.a, output.low_rank.b, output.low_rank.magnitude]
        for tensor in parts:
            if tensor is not None and not all(is_finite(tensor.rows(*rows)) for rows in row_blocks(tensor.shape)):
                raise UserError(f"{tensor.path} holds NaN or infinity in {tensor.name}; train the adapter again")
