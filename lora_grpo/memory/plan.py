"""Plans a run from the model's config.json, before any weights are loaded, and prints the plan."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lora_grpo import console, distributed
from lora_grpo.config import Invocation, RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.files import disk
from lora_grpo.flags import flag
from lora_grpo.hardware import (
    MeasuredEngine,
    choose_engine,
    local_sampler,
    machine,
    measured_engine,
    uses_gpu,
    uses_vllm,
    with_gpu_defaults,
)
from lora_grpo.memory import estimate
from lora_grpo.memory.estimate import GIB
from lora_grpo.memory.fit import USABLE_FRACTION, Device, MemoryEstimate, Planner, refusal
from lora_grpo.memory.lengths import RowLengths
from lora_grpo.memory.shape import KNOWN_MODELS, Shape, UnknownFamily
from lora_grpo.memory.work import Work, count, disk_bytes
from lora_grpo.models import architectures, model_files
from lora_grpo.runs import saved_bytes

_SAMPLERS = {
    "transformers": "the built-in sampler",
    "merged": "the built-in sampler, on a merged copy of the model",
    "vllm": "vLLM and its own copy of the base model",
    "shared": "Unsloth's vLLM, on the trained weights",
}


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    config: RunConfig
    """The configuration, without the settings that depend on the GPU's memory."""
    engine: str
    work: Work
    derived: tuple[str, ...]
    """Names of the settings that the plan resolved."""
    assumptions: tuple[str, ...]
    measured: MeasuredEngine | None = None
    """The measurement by `check-gpu` that chose engine and sampling backend; None without one."""
    not_planned: str | None = None
    """The reason why the memory is not planned; None if it is."""
    planner: Planner | None = None
    """None if the memory is not planned."""
    row_lengths: RowLengths | None = None
    """The longest of the run's rows; None if the memory is planned for rows of the maximum length."""
    estimate: MemoryEstimate | None = None
    can_unquantize: bool = False
    """Whether a base in 16 bits is an alternative on a GPU."""
    disk_bytes: int | None = None
    """The size of checkpoints and adapters; None if the memory is not planned, because the adapter's is unknown."""
    vocabulary: int | None = None
    """The number of tokens that the model has embeddings of; None if its configuration does not say."""
    too_large: str | None = None
    """The error message for requested settings that do not fit, with a suggestion; None if they fit."""

    @property
    def shape(self) -> Shape | None:
        return self.planner.shape if self.planner else None

    @property
    def longest_context(self) -> int:
        """The most tokens of prompt plus completion that fit; 0 if the memory is not planned."""
        return self.planner.longest_context(self.config) if self.planner else 0

    @property
    def length(self) -> int:
        """Tokens of the longest row in training that the memory is planned for."""
        return estimate.Step(self.config, 1, 1, row_lengths=self.row_lengths).trained_length

    def check_disk(self) -> None:
        """Raise a UserError if the disk is too small for the files that the run has not written yet."""
        folder = self.config.folder
        disk.check_free_space(folder, (self.disk_bytes or 0) - saved_bytes(folder))

    def record(self) -> dict[str, Any]:
        """Return the entry `memory` of run.json, in GiB."""
        fit = self.estimate.record() if self.estimate else {"not_planned": self.not_planned}
        return {"memory": {"derived": list(self.derived), "length": self.length, **fit}}


def make_plan(config: RunConfig, invocation: Invocation) -> tuple[RunConfig, Plan]:
    """Plan a run whose rows have the maximum length; see `draft_plan` and `complete_plan`."""
    return complete_plan(draft_plan(config, invocation))


def draft_plan(config: RunConfig, invocation: Invocation) -> Plan:
    """Return the plan of a run without its memory, and its configuration with the engine and the sampling backend.

    With `invocation.plan` or `invocation.dry_run`, the GPU need not be present. With `invocation.resume`, finished
    steps are subtracted.

    Raises:
        UserError: the model cannot be trained, or the model's configuration cannot be read.
    """
    planning = invocation.plan or invocation.dry_run
    device, is_present = _find_device(config, planning=planning)
    model, note = _read_model(config, invocation)
    if not invocation.resume:  # which keeps its settings
        config = architectures.with_supported(config, model.get("model_type"))
    if not is_present:
        config = with_gpu_defaults(config)
    # run.json then names both, so a later measurement does not change them when the run is resumed.
    fastest = measured_engine(config, device.name) if is_present and not invocation.resume else None
    if fastest:
        config = replace(config, {"model": {"engine": fastest.engine}, "sampling": {"backend": fastest.backend}})
    engine, sampler = choose_engine(config), local_sampler(config)
    assumptions = note + _assumptions(config, device, is_present=is_present)
    derived = list[str]()
    if not device.on_cpu and config.train.micro_batch_size is None:
        derived.append("train.micro_batch_size")
    if not device.on_cpu and config.model.gpu_memory_share is None and sampler != "transformers":
        derived.append("model.gpu_memory_share")
    architectures.check_architecture(model, config.model, engine)
    work = Work.of(config, resumed=invocation.resume)
    sizes = (values.get("vocab_size") for values in (model.get("text_config") or {}, model))
    vocabulary = next((size for size in sizes if isinstance(size, int)), None)
    plan = Plan(config, engine, work, tuple(derived), tuple(assumptions), fastest, vocabulary=vocabulary)
    if device.on_cpu and uses_vllm(config) and not config.sampling.server_url:
        return dataclasses.replace(plan, not_planned="vLLM's memory on a CPU is unknown")
    try:
        shape = Shape.of(model)
    except UnknownFamily as error:
        if derived:
            raise UserError(f"{error}; pass {' and '.join(map(flag, derived))}") from None
        return dataclasses.replace(plan, not_planned=str(error))
    shape.check_targets(config.lora.targets)
    fused, packs = engine == "unsloth" and not device.on_cpu, engine == "peft"
    # On a CPU, the built-in sampler uses a merged copy of the model, except with DoRA.
    on_copy = device.on_cpu and not config.lora.dora
    planner = Planner(shape, device, "merged" if on_copy else sampler, fused, packs)
    can_unquantize = config.model.bits == 4 and not device.on_cpu and "quantization_config" not in model
    return dataclasses.replace(plan, planner=planner, can_unquantize=can_unquantize)


def complete_plan(plan: Plan, row_lengths: RowLengths | None = None) -> tuple[RunConfig, Plan]:
    """Plan the memory of a run, and return its configuration with the settings resolved that depend on the GPU's.

    `row_lengths`: those of the run's rows; by default, they have the maximum length. Raises a UserError if the run
    does not fit, or if the rows have a token without an embedding.
    """
    plan = dataclasses.replace(plan, row_lengths=row_lengths)
    config = plan.config
    if row_lengths and plan.vocabulary and row_lengths.largest_token_id >= plan.vocabulary:
        raise UserError(
            f"the tokenizer of {config.model.name} uses token {row_lengths.largest_token_id}, but the model has "
            f"embeddings of 0 to {plan.vocabulary - 1} only; use the model's own tokenizer, or resize its embeddings"
        )
    if not plan.planner:
        return config, plan
    planner = dataclasses.replace(plan.planner, row_lengths=row_lengths)
    fit = planner.choose(config)
    if fit is None:
        raise UserError(refusal(planner, config))
    plan = dataclasses.replace(
        plan,
        planner=planner,
        estimate=fit,
        disk_bytes=disk_bytes(config, fit.parts["adapter"], fit.parts["optimizer"], planner.shape.vocabulary),
        too_large=None if fit.fits else refusal(planner, config),
    )
    if not planner.device.on_cpu:
        resolved = {"train": {"micro_batch_size": fit.micro_batch_size}}
        config = replace(config, {**resolved, "model": {"gpu_memory_share": fit.gpu_memory_share}})
    return config, plan


def show_plan(plan: Plan) -> None:
    """Print a plan, or raise a UserError after it if the requested settings or the run's files do not fit."""
    shape, fit = plan.shape, plan.estimate
    console.result(
        _line("model", plan.config.model.name + (f": {count(shape.parameters)} parameters" if shape else ""))
    )
    if shape and fit:
        console.result(_engine(plan))
        console.result("\n".join(_table(fit)))
        declared = f"; the model declares a maximum of {shape.context:,}" if shape.context else ""
        console.result(_line("context", f"at most {plan.longest_context:,} tokens fit, with batches of one{declared}"))
    console.result("\n".join(_settings(plan)))
    other = plan.planner and plan.can_unquantize and plan.planner.choose(replace(plan.config, {"model": {"bits": 16}}))
    if other and other.fits:
        console.result(_line("16 bits", f"also fit: {other.needed / GIB:.2f} GiB; check-gpu measures which is faster"))
    console.result("\n- ".join(("\nAssumptions:", *plan.assumptions)))
    if plan.too_large:
        raise UserError(plan.too_large)
    plan.check_disk()


def summary(plan: Plan) -> Iterator[str]:
    """Yield the lines that a run prints at the start."""
    if plan.measured:
        yield _engine(plan)
    yield from _settings(plan)
    longest, declared = plan.config.model.max_sequence_tokens, plan.shape and plan.shape.context
    if declared and longest > declared:
        yield f"warning: --model.max-sequence-tokens {longest} exceeds the {declared} that the model declares"
    if plan.too_large:
        yield f"warning: {plan.too_large}"


def _read_model(config: RunConfig, invocation: Invocation) -> tuple[Mapping[str, Any], list[str]]:
    """Return the values of the model's config.json, and the assumption that they are those that are shipped, if so."""
    name = config.model.name
    try:
        return model_files.read_config(config.model), []
    except model_files.HubUnavailable as error:
        if not invocation.plan or name not in KNOWN_MODELS:  # a dry run needs the tokenizer
            fix = "pass --model.name with a folder, or `--model.name starter` for the bundled model"
            raise UserError(f"{error}; {fix}") from None
        return KNOWN_MODELS[name], [f"the dimensions of {name} come from lora_grpo: {error}"]


def _find_device(config: RunConfig, *, planning: bool) -> tuple[Device, bool]:
    """Return the device to plan for, and whether it is present."""
    gpus, _ = machine.nvidia_gpus()
    if uses_gpu(config):
        total, free = int(gpus[0].memory_gib * GIB), int(gpus[0].free_gib * GIB)
        memory, available = machine.machine_memory()
        if (processes := distributed.world_size()) > 1:
            # They start at different times and see different free memory, but must compute the same plan.
            free, available = total, memory // processes
        return Device(gpus[0].name, total, free, host=available), True
    if planning and (gigabytes := machine.preset_gigabytes(config.preset)):
        return Device(f"a GPU with {gigabytes} GB", gigabytes * GIB, gigabytes * GIB), False
    return Device("this machine", *machine.machine_memory(), on_cpu=True), True


def _assumptions(config: RunConfig, device: Device, *, is_present: bool) -> list[str]:
    """Return the assumptions of the plan."""
    share = f"{USABLE_FRACTION:g} of the free memory is usable (docs/before-you-train.md)"
    assumptions = [f"every completion has its maximum length; {share}"]
    if not is_present:
        absent = f"the GPU has {device.total / GIB:g} GiB, all of it free; no GPU was found on this machine"
        assumptions.insert(0, f"{absent}, so engine and sampling backend are those of the `gpu` extra")
    if config.data.filter_by_difficulty or config.monitor.rows:
        assumptions.append("the samples of validation and of --data.filter-by-difficulty are not included in the work")
    if config.sampling.server_url:
        assumptions.append("the vLLM server's own memory is not included")
    return assumptions


def _engine(plan: Plan) -> str:
    processes, best = distributed.world_size(), plan.measured
    text = plan.engine + (f", {processes} processes" if processes > 1 else "")
    return _line("engine", f"{text}, with {best.backend} the fastest in check-gpu on {best.date}" if best else text)


def _settings(plan: Plan) -> Iterator[str]:
    """Yield the planned settings, memory, work and disk space."""
    config = plan.config
    if fit := plan.estimate:
        trained_on = "reference answers" if config.method == "sft" else "completions"
        yield _line("micro-batch", f"{fit.micro_batch_size} {trained_on}")
        share = f", with {fit.gpu_memory_share:g} of the GPU's memory" if fit.gpu_memory_share else ""
        yield _line("sampling", f"{fit.max_num_seqs} completions in parallel, with {_SAMPLERS[fit.sampler]}{share}")
        sizes = f"{fit.training / GIB:.2f} GiB for training, {fit.sampling / GIB:.2f} GiB for sampling"
        yield _line("memory", f"{sizes}; {fit.device.free / GIB:.2f} GiB are free on {fit.device.name}")
        if fit.host_bytes:
            available = "" if fit.device.host is None else f"; {fit.device.host / GIB:.2f} GiB are available"
            yield _line("host memory", f"{fit.host_bytes / GIB:.2f} GiB for what leaves the GPU{available}")
    else:
        yield _line("memory", f"not planned: {plan.not_planned}")
    yield _line("length", _length(plan))
    yield _line("work", plan.work.text(config, plan.length))
    if plan.disk_bytes is not None:
        free = disk.size(disk.free_space(config.folder)[1])
        saved = f"about {disk.size(plan.disk_bytes)} of checkpoints and adapters"
        yield _line("disk", f"{saved} in {config.folder}; {free} are free")


def _length(plan: Plan) -> str:
    """Return the length that the memory is planned for, and where it comes from."""
    row_lengths = plan.row_lengths
    if row_lengths is None:
        source = "every prompt and completion has its maximum length; a run plans with its longest prompt"
    elif row_lengths.longest_answered:
        source = "the longest prompt with its reference answer"
    else:
        source = f"the longest of {row_lengths.rows:,} prompts has {row_lengths.longest_prompt:,}"
    return f"{plan.length:,} tokens: {source}"


def _table(fit: MemoryEstimate) -> Iterator[str]:
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
