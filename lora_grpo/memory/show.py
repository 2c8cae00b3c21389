"""Prints a plan: all of it for `--plan`, and its summary at the start of a run."""

from collections.abc import Iterator

from lora_grpo import console
from lora_grpo.commands import current_start, on_several_gpus
from lora_grpo.config import RunConfig
from lora_grpo.errors import UserError
from lora_grpo.files import disk
from lora_grpo.hardware import measured_engine_file
from lora_grpo.memory.estimate import GIB
from lora_grpo.memory.fit import MemoryEstimate
from lora_grpo.memory.plan import Plan
from lora_grpo.memory.step import starts_vllm
from lora_grpo.memory.work import Work
from lora_grpo.progress import duration

_SAMPLERS = {
    "transformers": "the built-in sampler",
    "merged": "the built-in sampler, on a merged copy of the model",
    "vllm": "vLLM and its own copy of the base model",
    "shared": "Unsloth's vLLM, on the trained weights",
}

_MUCH = 0.5 * GIB
"""Memory that other programs use without being mentioned; the driver alone takes some hundred MiB."""


def show_plan(plan: Plan) -> None:
    """Print a plan, or raise a UserError after it if the requested settings or the run's files do not fit."""
    size = f": {_count(plan.shape.parameters)} parameters" if plan.shape else ""
    console.result(_line("model", f"{plan.config.model.name}{size}"))
    if plan.estimate or plan.measured:
        console.result(engine_line(plan))
    if plan.shape and plan.estimate:
        console.result("\n".join(_memory_table(plan.estimate)))
        declared = ""
        if plan.shape.context:
            declared = f"; the model declares a maximum of {plan.shape.context:,}"
        console.result(_line("context", f"at most {plan.longest_context:,} tokens fit, with batches of one{declared}"))
    for line in _settings(plan):
        console.result(line)
    if plan.unused_gpus:
        console.result(_gpus_line(plan.unused_gpus + 1))
    console.result("\n- ".join(("\nAssumptions:", *plan.assumptions)))
    if plan.too_large:
        raise UserError(plan.too_large)
    plan.check_disk()


def summary(plan: Plan) -> Iterator[str]:
    """Yield the lines that a run prints at the start."""
    if plan.measured or plan.not_fitting:
        yield engine_line(plan)
    yield from _settings(plan)
    if plan.unused_gpus:
        yield _gpus_line(plan.unused_gpus + 1)
    limit = plan.config.model.max_sequence_tokens
    declared_by = {"model": plan.shape.context if plan.shape else None}
    if plan.planner and plan.planner.teacher and plan.planner.teacher.own_bits:
        declared_by["teacher"] = plan.planner.teacher.shape.context
    for name, declared in declared_by.items():
        if declared and limit > declared:
            yield f"warning: --model.max-sequence-tokens {limit} exceeds the {declared} that the {name} declares"
    if plan.too_large:
        yield f"warning: {plan.too_large}"


def _gpus_line(gpus: int) -> str:
    """Return that one of several GPUs is used, and the command that trains on all of them."""
    text = f"{gpus}, one is used; with PEFT, a recipe trains on all of them, untested on GPUs (docs/gpu-reference.md)"
    if current_start().by != "python":
        text += f":\n{on_several_gpus(gpus)}"
    return _line("GPUs", text)


def engine_line(plan: Plan) -> str:
    """Return the engine and, if it was not the first choice, the reason.

    The reason names the day and the file of `check-gpu`'s measurement, or what does not fit.
    """
    engine = plan.engine
    processes = plan.config.processes
    if processes > 1:
        engine += f", {processes} processes"
    if plan.measured:
        chosen = f"with {plan.measured.backend} the fastest in check-gpu on {plan.measured.date}"
        engine += f", {chosen} ({measured_engine_file()})"
    if plan.not_fitting:
        engine += f" with {plan.backend}, because {plan.not_fitting} does not fit"
    return _line("engine", engine)


def _settings(plan: Plan) -> Iterator[str]:
    """Yield the planned settings, memory, work and disk space."""
    config = plan.config
    if plan.choice:
        yield _line("base", plan.choice)
    if config.teacher.name:
        yield _line("teacher", _teacher_text(plan))
    if plan.estimate:
        yield from _memory_lines(plan.estimate, config)
    else:
        yield _line("memory", f"not planned: {plan.not_planned}")
    yield _line("length", _length_text(plan))
    yield _line("work", work_text(plan.work, config, plan.length))
    if plan.disk_bytes is not None:
        free = disk.size(disk.free_space(config.folder).num_bytes)
        saved = f"about {disk.size(plan.disk_bytes)} of checkpoints and adapters"
        yield _line("disk", f"{saved} in {config.folder}; {free} are free")


def _teacher_text(plan: Plan) -> str:
    """Return what the teacher is, its memory, and how it is weighted against the rewards."""
    settings = plan.config.teacher
    kind = "its memory is not planned"
    if plan.estimate and plan.planner and plan.planner.teacher:
        teacher = plan.planner.teacher
        if teacher.own_bits is not None:
            kind = f"a second model in {teacher.own_bits} bits, {_gib(plan.estimate.parts['teacher'])}"
        elif teacher.adapter_parameters:
            kind = f"an adapter on the same base, {_gib(plan.estimate.parts['teacher'])}"
        else:
            kind = "the base without an adapter"
    return (
        f"{settings.name}, {kind}; {settings.loss.replace('_', ' ')} with weight {settings.weight:g}, rewards with "
        f"{settings.reward_weight:g}"
    )


def _memory_lines(estimate: MemoryEstimate, config: RunConfig) -> Iterator[str]:
    device = estimate.device
    trained_on = _trained_on(config)
    yield _line("micro-batch", f"{estimate.micro_batch_size} {trained_on}")
    share = ""
    if estimate.gpu_memory_share:
        share = f", with {estimate.gpu_memory_share:g} of the GPU's memory"
    if config.sampling.server_url:
        yield _line("sampling", f"by the vLLM server at {config.sampling.server_url}")
    else:
        sampler = _SAMPLERS[estimate.sampler]
        yield _line("sampling", f"{estimate.max_num_seqs} completions in parallel, with {sampler}{share}")
    needed = f"{_gib(estimate.training)} for training, {_gib(estimate.sampling)} for sampling"
    used = device.total - device.free
    others = ""
    if used > _MUCH and not device.on_cpu:
        others = f", {_gib(used)} are used by other programs and the driver"
    yield _line("memory", f"{needed}; {_gib(device.free)} are free on {device.name}{others}")
    if starts_vllm(estimate.sampler):
        if estimate.engine_sleeps:
            yield _line("vLLM", "gives its memory back while the model is trained, and takes time to wake up")
        else:
            yield _line("vLLM", "keeps its memory while the model is trained: both fit at once")
    if estimate.host_bytes:
        available = ""
        if estimate.host_available is not None:
            available = f"; {_gib(estimate.host_available)} are available"
        if device.is_unified:
            available += " in the memory that GPU and CPU share"
        yield _line("host memory", f"{_gib(estimate.host_bytes)} for what leaves the GPU{available}")


def _length_text(plan: Plan) -> str:
    """Return the length that the memory is planned for, and where it comes from."""
    lengths = plan.row_lengths
    if lengths is None:
        source = "every prompt and completion has its maximum length; a run plans with its longest prompt"
    elif lengths.longest_answered:
        source = "the longest prompt with its reference answer"
    else:
        source = f"the longest of {lengths.rows:,} prompts has {lengths.longest_prompt:,}"
    return f"{plan.length:,} tokens: {source}"


def work_text(work: Work, config: RunConfig, length: int) -> str:
    """Return the work as one line, with rows of at most `length` tokens."""
    trained_on = _trained_on(config)
    time = duration(3600 * (work.hours or 0.0))
    if work.steps == 0:
        line = "no steps are left"
    elif work.steps is None:
        line = f"as many steps x {work.completions_per_step} {trained_on} as fit in {time}"
    else:
        total = work.steps * work.completions_per_step
        line = f"{work.steps:,} steps x {work.completions_per_step} = {total:,} {trained_on}"
        line += f", at most {_count(total * length)} tokens"
        if work.hours is not None:
            line += f", or as many as fit in {time}"
    if work.completions_per_evaluation:
        line += f"; {work.completions_per_evaluation:,} completions in each evaluation"
    also = config.eval.also_limit * len(config.eval.also)
    if also:
        line += f"; {also:,} more in each for --eval.also"
    return line


def _memory_table(estimate: MemoryEstimate) -> Iterator[str]:
    """Yield a table of memory by part and phase, in GiB."""
    phases = estimate.phases
    names = [name for name in estimate.parts if any(name in phase for phase in phases.values())]
    width = max(map(len, names)) + 2

    def row(name: str, *sizes: int) -> str:
        cells = "".join(f"{size / GIB:>10.2f}" for size in sizes)
        return f"{name.replace('_', ' '):<{width}}{cells}"

    headings = "".join(f"{phase:>10}" for phase in phases)
    yield f"\n{'GiB':<{width}}{headings}"
    for name in names:
        yield row(name, *(phase.get(name, 0) for phase in phases.values()))
    yield row("total", *(sum(phase.values()) for phase in phases.values()))
    yield row("usable", *[estimate.device.usable] * len(phases)) + "\n"


def _trained_on(config: RunConfig) -> str:
    return "reference answers" if config.method == "sft" else "completions"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _count(number: float) -> str:
    """Format a count with three significant digits: 16.4 million."""
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {word}"
    return f"{number:,.0f}"


def _line(name: str, text: str) -> str:
    return f"{name:<12}{text}"
