"""`--plan`: the plan of a run as text."""

from __future__ import annotations

from lora_grpo.errors import UserError
from lora_grpo.models import GIB
from lora_grpo.planning.fit import Fit
from lora_grpo.planning.plan import Largest, Plan, count

_DRAWN_BY = {
    "transformers": "the kit's own sampler",
    "merged": "the kit's own sampler, on an unpacked copy",
    "vllm": "vLLM, with a copy of the base",
    "shared": "Unsloth's vLLM, on the trained weights",
}


def show_plan(plan: Plan) -> None:
    """Print a plan.

    Raises:
        UserError: what the user named does not fit.
    """
    print("\n".join(_lines(plan)))
    if plan.too_large:
        raise UserError(plan.too_large)


def _lines(plan: Plan) -> list[str]:
    lines = [_line("model", _model(plan))]
    if plan.fit and plan.largest:
        lines += _memory(plan.fit) + _room(plan, plan.fit, plan.largest)
    else:
        lines.append(_line("memory", f"not planned: {plan.not_planned}"))
    work = plan.work
    evaluated = (
        "before and after, of all held-out rows, whose number is known once they are loaded"
        if work.evaluated is None
        else f"{work.evaluated:,} completions, before and after together"
    )
    lines += [
        _line(
            "work",
            f"{work.steps:,} steps x {work.completions_per_step} = {work.completions:,} completions; at most "
            f"{count(work.tokens)} tokens",
        ),
        *([] if work.evaluated == 0 else [_line("evaluation", evaluated)]),
        _line("time", plan.time.said()),
        "",
        "Assumed:",
        *(f"- {assumption}" for assumption in plan.assumptions),
    ]
    return lines


def _model(plan: Plan) -> str:
    text = plan.model
    if plan.shape and plan.fit:
        in_linears, adapter = plan.shape.linear_parameters, plan.fit.parts["adapter"] // 4
        text += f": {count(plan.shape.parameters)} parameters, {count(in_linears)} of them in linear layers; "
        text += f"adapter {count(adapter)}"
    return text


def _memory(found: Fit) -> list[str]:
    """Return the table of parts at the three moments, in GiB."""
    card, phases = found.card, found.phases
    names = [name for name in found.parts if any(phase.get(name) for phase in phases.values())]
    width = max(map(len, names)) + 2
    heads = "".join(f"{moment:>10}" for moment in phases)
    where = "memory" if card.on_cpu else "GPU"
    lines = [
        _line(where, f"{card.name}: {card.free / GIB:.2f} GiB free of {card.total / GIB:.2f}"),
        "",
        f"{'GiB':<{width}}{heads}",
    ]
    for name in names:
        sizes = "".join(_cell(phase.get(name, 0)) for phase in phases.values())
        lines.append(f"{name.replace('_', ' '):<{width}}{sizes}")
    sums = "".join(_cell(sum(phase.values())) for phase in phases.values())
    usable = f"{'can be used':<{width}}" + _cell(card.usable) * len(phases)
    return [*lines, f"{'together':<{width}}{sums}", usable, ""]


def _room(plan: Plan, found: Fit, largest: Largest) -> list[str]:
    drawn = f"{found.max_num_seqs} completions by {_DRAWN_BY[found.sampler]}"
    if found.gpu_memory_share:
        drawn += f", its share of the GPU {found.gpu_memory_share:g}"
    own = f"; the model declares {largest.declared:,}" if largest.declared else ""
    return [
        _line("engine", plan.engine + (f", {plan.processes} processes" if plan.processes > 1 else "")),
        _line(
            "micro-batch", f"{found.micro_batch_size} completions; the largest that fits: {largest.micro_batch_size}"
        ),
        _line("at once", drawn),
        _line(
            "context",
            f"{found.max_model_len:,} tokens; the longest that fits: {largest.context:,} with this micro-batch "
            f"and as many at once, {largest.context_at_least:,} with as few as can be{own}",
        ),
    ]


def _line(name: str, text: str) -> str:
    return f"{name:<12}{text}"


def _cell(size: int) -> str:
    """Return a size in GiB."""
    text = "-" if not size else "<0.01" if size < 0.005 * GIB else f"{size / GIB:.2f}"
    return f"{text:>10}"
