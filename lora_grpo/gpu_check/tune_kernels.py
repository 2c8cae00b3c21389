"""Find the fastest launch settings of vLLM's LoRA kernel on this GPU, and save them as the table that runs use.

    python -m lora_grpo.gpu_check.tune_kernels 180    # seconds of search

vLLM's default was chosen for other GPUs and models. hardware/lora_kernels.py says what the kernel computes and where
the table goes. The candidates include the default, so the table is never slower than it in these measurements.
"""

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.hardware import ShrinkKernel, ShrinkShape, save_tuned, vllm_default
from lora_grpo.models import base_model

Launch = Callable[[ShrinkKernel], Any]
"""Launches the kernel with given settings, and returns its products (slices, batch, rank)."""
Prepare = Callable[[Any, Sequence[Any]], Launch]
"""Prepares launches for an input (batch, width) and the matrix A (rank, width) of each slice."""

BATCH = 64
"""Completions of a default step, which are decoded at once."""
RANK = 16
WIDTHS = (896, 1536, 2048, 3584, 4864, 8960, 11008)
"""Hidden and inner sizes of Qwen2.5 0.5B, 1.5B and 3B. vLLM takes the nearest one for other models."""
SLICES = (1, 2, 3)
"""Output and down projection; gate and up projection; query, key and value projection."""
SHAPES = tuple(ShrinkShape(slices, BATCH, width, RANK) for slices, width in itertools.product(SLICES, WIDTHS))

_CALLS = 20
"""Calls that are timed together on a CPU."""
_TOLERANCE = 0.02
"""Largest relative error of a candidate's product, of inputs in 16 bits."""


@dataclass(frozen=True)
class Timing:
    """A candidate that computes the right product."""

    shape: ShrinkShape
    kernel: ShrinkKernel
    microseconds: float
    """Median time of a call."""


def candidates(shape: ShrinkShape) -> Iterator[ShrinkKernel]:
    """Yield launch settings to try: first vLLM's own, then those without empty parts."""
    default = vllm_default(shape.batch)
    yield default
    for block_k, split_k in itertools.product((64, 128, 256), (1, 2, 4, 8, 16)):
        kernel = ShrinkKernel(block_k=block_k, split_k=split_k)
        has_empty_parts = block_k * (split_k - 1) >= shape.width
        if kernel != default and not has_empty_parts:
            yield kernel


def tune(
    shapes: Sequence[ShrinkShape] = SHAPES,
    prepare: Prepare | None = None,
    device: str = "cuda",
    dtype: Any = None,
    seconds: float = 180.0,
) -> list[Timing]:
    """Time all candidates of each shape, and return them. Use a process of its own: vLLM's choice is replaced in it.

    Args:
        prepare: by default, `prepare_vllm`.
        device: where the tensors are.
        dtype: of inputs and matrices; by default, that of the base, which has 16 bits on a GPU.
        seconds: time limit.

    Raises:
        RunError: the time is over before all shapes are measured. vLLM would use the entries of some widths for others.
    """
    import torch

    deadline = time.monotonic() + seconds
    prepare = prepare or prepare_vllm
    dtype = dtype or base_model.compute_dtype()
    timings: list[Timing] = []
    for number, shape in enumerate(shapes):
        torch.manual_seed(0)
        inputs = torch.randn(shape.batch, shape.width, device=device).to(dtype)
        matrices = [torch.randn(shape.rank, shape.width, device=device).to(dtype) for _ in range(shape.slices)]
        expected = torch.stack([inputs.float() @ matrix.float().T for matrix in matrices])
        launch = prepare(inputs, matrices)
        for kernel in candidates(shape):
            if time.monotonic() > deadline:
                raise RunError(
                    f"{seconds:.0f} s were enough for {number} of {len(shapes)} shapes, and part of a table is not "
                    "saved; pass more --minutes"
                )
            error = (launch(kernel) - expected).norm() / expected.norm()  # the first launch also compiles
            if error <= _TOLERANCE:
                call = functools.partial(launch, kernel)
                timings.append(Timing(shape, kernel, _microseconds(call, device)))
    return timings


def _microseconds(call: Callable[[], Any], device: str) -> float:
    """Return the time of a call. On a GPU, in a CUDA graph, as vLLM decodes: launching takes longer than the kernel."""
    if device == "cuda":
        from triton.testing import do_bench_cudagraph

        return 1000 * float(do_bench_cudagraph(call, return_mode="median"))
    started = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return 1e6 * (time.perf_counter() - started) / _CALLS


def fastest(timings: Sequence[Timing]) -> dict[ShrinkShape, Timing]:
    """Return the fastest candidate of each shape."""
    best: dict[ShrinkShape, Timing] = {}
    for timing in timings:
        if timing.shape not in best or timing.microseconds < best[timing.shape].microseconds:
            best[timing.shape] = timing
    return best


def prepare_vllm(inputs: Any, matrices: Sequence[Any]) -> Launch:
    """Prepare launches of vLLM's kernel; see `Prepare`."""
    import torch
    from vllm.lora.ops.triton_ops import lora_shrink_op, utils
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    utils._LORA_A_PTR_DICT.clear()  # keeps the strides of matrices that had the same address
    batch = inputs.shape[0]
    metadata = LoRAKernelMeta.make(1, batch, inputs.device)
    metadata.prepare_tensors(torch.zeros(batch, dtype=torch.int32, device=inputs.device))  # all use adapter 0
    arguments = metadata.meta_args(batch, specialize_active_lora=False)
    adapters = [matrix[None, None] for matrix in matrices]  # (adapters, 1, rank, width)
    products = torch.empty(len(matrices), batch, matrices[0].shape[0], device=inputs.device)

    def launch(kernel: ShrinkKernel) -> Any:
        lora_shrink_op.get_lora_op_configs = lambda *sizes, **named_sizes: kernel.entry()
        lora_shrink_op._lora_shrink(inputs, adapters, products, *arguments, 1.0)
        return products

    return launch


def main() -> None:
    """Tune the kernel on this GPU, save the table, and print it beside vLLM's default."""
    import torch

    gpu = torch.cuda.get_device_name()
    try:
        timings = tune(seconds=float(sys.argv[1]))
    except RunError as error:
        sys.exit(f"error: {error}")
    kernels = {}
    for shape, timing in fastest(timings).items():
        text = f"{shape.slices} x {shape.width} -> {shape.rank}"
        default = vllm_default(shape.batch)
        times = {other.kernel: other.microseconds for other in timings if other.shape == shape}
        if default not in times:
            print(f"{text}: skipped, because the product of vLLM's default is wrong")
            continue
        kernels[shape] = timing.kernel
        print(
            f"{text}: {timing.microseconds:.1f} us with split_k {timing.kernel.split_k}, "
            f"vLLM's default {times[default]:.1f}"
        )
    print(save_tuned(gpu, kernels))


if __name__ == "__main__":
    main()
