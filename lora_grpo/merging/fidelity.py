"""How much of an adapter's update a merge keeps, once its weights are rounded.

A weight in bfloat16 has eight bits: an update below half of the last one rounds away. With Δ the update, W the base and
W' the rounded merge,

    retained = ⟨W' - W, Δ⟩ / ‖Δ‖²       1 keeps all of Δ, 0 none of it
    error    = ‖W' - W - Δ‖ / ‖Δ‖       what rounding adds, as a share of Δ

`retained` is what `auto` decides by. Greedy answers agree long after half of an update is gone, so they prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lora_grpo.errors import UserError
from lora_grpo.files import row_blocks
from lora_grpo.merging.delta import Output
from lora_grpo.merging.merged_tensors import MergedTensor, is_finite

Dtype = Literal["bf16", "fp16", "fp32"]
TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
STORED = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
ENOUGH = 0.99
"""The share of an update that `auto` wants kept."""
LARGEST_FP16 = 65504.0


@dataclass
class Kept:
    """Sums over one tensor, or several, in float64."""

    dot: float = 0.0
    """⟨W' - W, Δ⟩."""
    squares: float = 0.0
    """‖Δ‖²."""
    errors: float = 0.0
    """‖W' - W - Δ‖²."""

    @property
    def retained(self) -> float | None:
        return self.dot / self.squares if self.squares else None

    @property
    def error(self) -> float | None:
        return math.sqrt(self.errors / self.squares) if self.squares else None

    def add(self, other: Kept) -> None:
        self.dot += other.dot
        self.squares += other.squares
        self.errors += other.errors


@dataclass
class Fidelity:
    """What one dtype keeps of all updates."""

    dtype: Dtype
    layers: dict[str, Kept] = field(default_factory=dict)

    @property
    def overall(self) -> Kept:
        total = Kept()
        for kept in self.layers.values():
            total.add(kept)
        return total

    @property
    def worst(self) -> tuple[str, float] | None:
        """The tensor that keeps least, and how much; None where nothing changes."""
        found = [(name, kept.retained) for name, kept in self.layers.items() if kept.retained is not None]
        return min(found, key=lambda item: item[1]) if found else None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for merge_report.json."""
        overall, worst = self.overall, self.worst
        return {
            "overall": overall.retained,
            "error": overall.error,
            "worst": worst and worst[1],
            "worst_layer": worst and worst[0],
        }


def measure(outputs: Mapping[str, Output], dtypes: Sequence[Dtype]) -> dict[Dtype, Fidelity]:
    """Measure what each dtype would keep of every update.

    Tensors that the base has not, or has in another shape, have no update to keep and are left out.

    Args:
        outputs: the plan's.
        dtypes: the candidates; all are measured in one pass over the weights.
    """
    import torch

    found = {dtype: Fidelity(dtype) for dtype in dtypes}
    for name, output in outputs.items():
        if not output.changed or output.base is None or output.base.shape != output.shape:
            continue
        tensor = MergedTensor(output)
        sums = {dtype: Kept() for dtype in dtypes}
        for start, stop in row_blocks(output.shape):
            merged, base, change = tensor.rows_and_change(start, stop)
            squares = _square(change)
            for dtype, kept in sums.items():
                difference = merged.to(getattr(torch, TORCH[dtype])).float().sub_(base)
                if dtype == "fp16":  # what overflows would make every figure infinite; `too_large` judges the range
                    difference.nan_to_num_()
                dot = _dot(difference, change)
                kept.add(Kept(dot, squares, _square(difference.sub_(change))))
        for dtype, kept in sums.items():
            found[dtype].layers[name] = kept
    return found


def _dot(first: Any, second: Any) -> float:
    """Return the inner product, summed in float32 along a row and in float64 over rows."""
    return float((first * second).sum(dim=-1).double().sum())


def _square(matrix: Any) -> float:
    """Return the sum of squares, as `_dot` would."""
    import torch

    return float(torch.linalg.vector_norm(matrix, dim=-1).double().square().sum())


def candidates(asked: Dtype | Literal["auto"], base_dtype: str) -> list[Dtype]:
    """Return the dtypes to measure: the one asked for, or those that `auto` may take before float32.

    Args:
        asked: `--dtype`.
        base_dtype: of the base's weights; to write float16 weights as bfloat16 would round the base itself.
    """
    if asked != "auto":
        return [asked]
    return ["fp16"] if base_dtype == "F16" else ["bf16", "fp16"]


def choose(measured: Mapping[Dtype, Fidelity], outputs: Mapping[str, Output]) -> tuple[Dtype, str]:
    """Return the smallest dtype that keeps ENOUGH of the update, and why, in words.

    Args:
        measured: the candidates, in the order they are preferred.
        outputs: the plan's; where float16 is in question, all are read to see whether they fit its range.
    """
    reasons = []
    for dtype, fidelity in measured.items():
        retained = fidelity.overall.retained
        if retained is None:
            return dtype, "the adapter changes nothing"
        if retained < ENOUGH:
            reasons.append(f"{dtype} keeps {share(retained)} of the update")
            continue
        if dtype == "fp16" and (name := too_large(outputs)):
            reasons.append(f"{name} does not fit fp16's range")
            continue
        return dtype, "; ".join([*reasons, f"{dtype} keeps {share(retained)}"])
    return "fp32", "; ".join([*reasons, "only fp32 holds it"])


def too_large(outputs: Mapping[str, Output]) -> str | None:
    """Return the name of a tensor that float16 cannot hold, or None."""
    for name, output in outputs.items():
        tensor = MergedTensor(output)
        if output.shape and any(
            float(tensor.rows(*rows).abs().max()) > LARGEST_FP16 for rows in row_blocks(output.shape)
        ):
            return name
    return None


def check_finite(outputs: Mapping[str, Output]) -> None:
    """Refuse an adapter that holds NaN or infinity, before anything is written.

    Raises:
        UserError: names the first such tensor.
    """
    for output in outputs.values():
        parts = [output.replacement, output.tokens and output.tokens[0], output.bias and output.bias[0]]
        if output.low_rank:
            parts += [output.low_rank.a, output.low_rank.b, output.low_rank.magnitude]
        for tensor in parts:
            if tensor is not None and not all(is_finite(tensor.rows(*rows)) for rows in row_blocks(tensor.shape)):
                raise UserError(f"{tensor.path} holds NaN or infinity in {tensor.name}; this training went wrong")


def share(value: float) -> str:
    """Return a share as a percentage; 99.96 % is not rounded up to all, 99.9999 % (of float32's noise) is."""
    return f"{math.floor(value * 1000 + 0.01) / 10:.1f} %"
