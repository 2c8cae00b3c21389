"""Prints the plan of a run: in full for `--plan`, and a summary at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator

from lora_grpo import distributed
from lora_grpo.errors import UserError
from lora_grpo.models import GIB
from lora_grpo.planning.fit import Fit
from lora_grpo.planning.plan import Plan
from lora_grpo.planning.work import count

_SAMPLERS = {
    "transformers": "the built-in sampler",
    "merged": "the built-in sampler, on a merged copy of the model",
    "vllm": "vLLM and its own copy of the base model",
    "shared": "Unsloth's vLLM, on the trained weights",
}


def show_plan(plan: Plan) -> None:
    """Print a plan, or raise a UserError after it if the requested settings or the run's files do not fit."""
    shape, fit = plan.shape, plan.fit
    print(_line("model", plan.model + (f": {count(shape.parameters)} parameters" if shape else "")))
    if shape and fit:
        processes = distributed.world_size()
        print(_line("engine", plan.engine + (f", {processes} processes" if processes > 1 else "")))
        print("\n".join(_table(fit)))
        declared = f"; the model declares a maximum of {shape.context:,}" if shape.context else ""
        print(_line("context", f"at most {plan.longest_context:,} tokens fit, with batches of one{declared}"))
    print("\n".join(_settings(plan)))
    print("\n- ".join(("\nAssumptions:", *plan.assumptions)))
    if plan.too_large:
        raise UserError(plan.too_large)
    plan.check_disk()


def summary(plan: Plan) -> Iterator[str]:
    """Yield the lines that a run prints at the start."""
    yield from _settings(plan)
    if plan.too_large:
        yield f"warning: {plan.too_large}"


def _settings(plan: Plan) -> Iterator[str]:
    """Yield the planned settings, memory, work and disk space."""
    if fit := plan.fit:
        yield _line("micro-batch", f"{fit.micro_batch_size} {plan.work.trained_on}")
        share = f", with a share of {fit.gpu_memory_share:g} of the GPU" if fit.gpu_memory_share else ""
        yield _line("sampling", f"{fit.max_num_seqs} completions in parallel, with {_SAMPLERS[fit.sampler]}{share}")
        sizes = f"{fit.training / GIB:.2f} GiB for training, {fit.sampling / GIB:.2f} GiB for sampling"
        yield _line("memory", f"{sizes}; {fit.device.free / GIB:.2f} GiB are free on {fit.device.name}")
    else:
        yield _line("memory", f"not planned: {plan.not_planned}")
    yield _line("work", plan.work.text())
    yield _line("disk", plan.disk.text() if plan.disk else "not planned, because the memory is not")


def _table(fit: Fit) -> Iterator[str]:
    """Yield a table of memory by part and phase, in GiB."""
    phases = fit.phases
    names = [name for name in fit.parts if any(name in phase for phase in phases.values())]
    width = max(map(len, names)) + 2

    def row(name: str, *sizes: int) -> str:
        return f"{name.replace('_', ' '):<{width}}" + "".join(f"{size / GIB:>10.2f}" for size in sizes)

    yield f"\n{'GiB':<{width}}" + "".join(f"{phase:>10}" for phase in phases)
    yield from (row(name, *(phase.get(name, 0) for phase in phases.values())) for name in names)
    yield row("total", *(sum(phase.values()) for phase in phases.values()))
    yield row("usable", *[fit.device.usable] * len(phases)) + "\n"


def _line(name: str, text: str) -> str:
    return f"{name:<12}{text}"
