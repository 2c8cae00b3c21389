"""Prints the plan of a run for `--plan`."""

from __future__ import annotations

from collections.abc import Iterator

from lora_grpo.errors import UserError
from lora_grpo.models import GIB
from lora_grpo.planning.fit import Fit
from lora_grpo.planning.plan import Largest, Plan, count

_SAMPLERS = {
    "transformers": "the kit's own sampler",
    "merged": "the kit's own sampler, on an unpacked copy",
    "vllm": "vLLM, with its own copy of the base model",
    "shared": "Unsloth's vLLM, on the trained weights",
}


def show_plan(plan: Plan) -> None:
    """Print a plan.

    Raises:
        UserError: the requested settings do not fit.
    """
    print("\n".join(_lines(plan)))
    if plan.too_large:
        raise UserError(plan.too_large)


def _lines(plan: Plan) -> Iterator[str]:
    yield _line("model", _model(plan))
    if plan.fit and plan.largest:
        yield from _memory(plan.fit)
        yield from _settings(plan, plan.fit, plan.largest)
    else:
        yield _line("memory", f"not planned: {plan.not_planned}")
    work = plan.work
    completions = f"{work.steps:,} steps x {work.completions_per_step} = {work.completions:,} completions"
    yield _line("work", f"{completions}; at most {count(work.tokens)} tokens")
    if work.evaluated is None:
        yield _line("evaluation", "before and after, on all evaluation rows, counted once they are loaded")
    elif work.evaluated:
        yield _line("evaluation", f"{work.evaluated:,} completions, before and after together")
    yield _line("time", plan.duration.text())
    yield "\nAssumptions:"
    yield from (f"- {assumption}" for assumption in plan.assumptions)


def _model(plan: Plan) -> str:
    if not plan.shape or not plan.fit:
        return plan.model
    return (
        f"{plan.model}: {count(plan.shape.parameters)} parameters, {count(plan.shape.linear_parameters)} of them in "
        f"linear layers; adapter {count(plan.fit.parts['adapter'] // 4)}"
    )


def _memory(fit: Fit) -> Iterator[str]:
    """Yield a table of memory by part and phase, in GiB."""
    device, phases = fit.device, fit.phases
    names = [name for name in fit.parts if any(phase.get(name) for phase in phases.values())]
    width = max(map(len, names)) + 2
    free = f"{device.name}: {device.free / GIB:.2f} GiB free of {device.total / GIB:.2f}"
    yield _line("memory" if device.on_cpu else "GPU", free) + "\n"
    yield f"{'GiB':<{width}}" + "".join(f"{phase:>10}" for phase in phases)
    for name in names:
        yield f"{name.replace('_', ' '):<{width}}" + "".join(_cell(phase.get(name, 0)) for phase in phases.values())
    yield f"{'total':<{width}}" + "".join(_cell(sum(phase.values())) for phase in phases.values())
    yield f"{'usable':<{width}}" + _cell(device.usable) * len(phases) + "\n"


def _settings(plan: Plan, fit: Fit, largest: Largest) -> Iterator[str]:
    """Yield the planned settings and the largest values that fit."""
    yield _line("engine", plan.engine + (f", {plan.processes} processes" if plan.processes > 1 else ""))
    yield _line("micro-batch", f"{fit.micro_batch_size} completions; largest that fits: {largest.micro_batch_size}")
    share = f", with a share of {fit.gpu_memory_share:g} of the GPU" if fit.gpu_memory_share else ""
    yield _line("sampling", f"{fit.max_num_seqs} completions in parallel by {_SAMPLERS[fit.sampler]}{share}")
    declared = f"; the model declares {largest.declared:,}" if largest.declared else ""
    yield _line(
        "context",
        f"{fit.max_model_len:,} tokens; longest that fits: {largest.context:,} with these batch sizes, "
        f"{largest.smallest_batch_context:,} with batches of one{declared}",
    )


def _line(name: str, text: str) -> str:
    return f"{name:<12}{text}"


def _cell(size: int) -> str:
    text = "-" if not size else "<0.01" if size < 0.005 * GIB else f"{size / GIB:.2f}"
    return f"{text:>10}"
