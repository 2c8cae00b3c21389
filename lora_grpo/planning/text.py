"""Prints the plan of a run: in full for `--plan`, and a summary at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator

from lora_grpo import distributed
from lora_grpo.errors import UserError
from lora_grpo.models import GIB
from lora_grpo.planning.duration import Work
from lora_grpo.planning.fit import Fit
from lora_grpo.planning.plan import Plan
from lora_grpo.runs import duration

_SAMPLERS = {
    "transformers": "the built-in sampler",
    "merged": "the built-in sampler, on a merged copy of the model",
    "vllm": "vLLM and its own copy of the base model",
    "shared": "Unsloth's vLLM, on the trained weights",
}


def show_plan(plan: Plan) -> None:
    """Print a plan, or raise a UserError after it if the requested settings or the run's files do not fit."""
    print("\n".join(_lines(plan)))
    if plan.too_large:
        raise UserError(plan.too_large)
    plan.check_disk()


def summary(plan: Plan) -> Iterator[str]:
    """Yield the lines that a run prints at the start."""
    yield from _settings(plan)
    if plan.too_large:
        yield f"warning: {plan.too_large}"


def _settings(plan: Plan) -> Iterator[str]:
    """Yield the planned settings, memory, work and time."""
    if fit := plan.fit:
        yield _line(
            "micro-batch", f"{fit.micro_batch_size} {plan.work.trained_on}; at most {plan.largest_micro_batch} fit"
        )
        share = f", with a share of {fit.gpu_memory_share:g} of the GPU" if fit.gpu_memory_share else ""
        yield _line("sampling", f"{fit.max_num_seqs} completions in parallel, with {_SAMPLERS[fit.sampler]}{share}")
        sizes = f"{fit.training / GIB:.2f} GiB for training, {fit.sampling / GIB:.2f} GiB for sampling"
        yield _line("memory", f"{sizes}; {fit.device.free / GIB:.2f} GiB are free on {fit.device.name}")
    else:
        yield _line("memory", f"not planned: {plan.not_planned}")
    work = plan.work
    evaluated = f"; plus {work.evaluated:,} completions for evaluation" if work.evaluated else ""
    yield _line("work", f"{_steps(work)}{evaluated}")
    yield _line("time", plan.duration.text())
    yield _line("disk", plan.disk.text() if plan.disk else "not planned, because the memory is not")


def _steps(work: Work) -> str:
    """Return the number of steps, completions and tokens as text."""
    if not work.steps and not work.hours:
        return "no steps are left"
    each = f"steps x {work.completions_per_step}"
    if work.hours is None:
        return f"{work.steps:,} {each} = {work.completions:,} {work.trained_on}, at most {_count(work.tokens)} tokens"
    hours = f"in {duration(3600 * work.hours)}"
    if work.fewest_steps is None:
        return f"as many {each} {work.trained_on} as fit {hours}"
    steps = " to ".join(f"{number:,}" for number in dict.fromkeys((work.fewest_steps, work.steps)))
    return f"{steps} {each} {work.trained_on} fit {hours} (validation not included)"


def _lines(plan: Plan) -> Iterator[str]:
    shape, fit = plan.shape, plan.fit
    if not shape or not fit:
        yield _line("model", plan.model)
    else:
        adapter = _count(fit.parts["adapter"] // 4)
        yield _line("model", f"{plan.model}: {_count(shape.parameters)} parameters, {adapter} in the adapter")
        processes = distributed.world_size()
        yield _line("engine", plan.engine + (f", {processes} processes" if processes > 1 else ""))
        yield from _table(fit)
        declared = f"; the model declares a maximum of {shape.context:,}" if shape.context else ""
        yield _line("context", f"at most {plan.longest_context:,} tokens fit, with batches of one{declared}")
    yield from _settings(plan)
    yield "\nAssumptions:"
    yield from (f"- {assumption}" for assumption in plan.assumptions)


def _table(fit: Fit) -> Iterator[str]:
    """Yield a table of memory by part and phase, in GiB."""
    phases = fit.phases
    names = [name for name in fit.parts if any(name in phase for phase in phases.values())]
    width = max(map(len, names)) + 2
    yield f"\n{'GiB':<{width}}" + "".join(f"{phase:>10}" for phase in phases)
    for name in names:
        yield f"{name.replace('_', ' '):<{width}}" + "".join(_cell(phase.get(name, 0)) for phase in phases.values())
    yield f"{'total':<{width}}" + "".join(_cell(sum(phase.values())) for phase in phases.values())
    yield f"{'usable':<{width}}" + _cell(fit.device.usable) * len(phases) + "\n"


def _line(name: str, text: str) -> str:
    return f"{name:<12}{text}"


def _cell(size: int) -> str:
    return f"{size / GIB:>10.2f}"


def _count(number: float) -> str:
    """Format a count with three significant digits: 16.4 million."""
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {word}"
    return f"{number:,.0f}"
