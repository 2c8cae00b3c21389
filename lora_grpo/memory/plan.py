"""Plans a run from the model's config.json, before any weights are loaded. `show.py` prints the plan.

A run is planned in two stages, because the lengths of its rows are known only after its data is loaded:

1. `draft_plan` finds the device, reads the model's dimensions, and chooses the engine and the sampling backend.
2. `complete_plan` gets the lengths, and chooses the bits of the base, gradient checkpointing, the micro-batch size and
   vLLM's memory fraction.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_grpo.config import Invocation, ModelConfig, RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.files import disk
from lora_grpo.flags import flag
from lora_grpo.hardware import (
    MeasuredEngine,
    choose_engine,
    machine,
    measured_engine,
    sampler_kind,
    settings_of_vllm,
    uses_gpu,
    uses_vllm,
    with_gpu_defaults,
)
from lora_grpo.memory import faster
from lora_grpo.memory.advice import refusal
from lora_grpo.memory.estimate import GIB
from lora_grpo.memory.fit import USABLE_FRACTION, Device, MemoryEstimate, Planner
from lora_grpo.memory.lengths import RowLengths
from lora_grpo.memory.shape import KNOWN_MODELS, Shape, UnknownFamily
from lora_grpo.memory.step import SamplerKind, Step, starts_vllm
from lora_grpo.memory.teacher import TeacherSize
from lora_grpo.memory.work import Work, disk_bytes
from lora_grpo.models import architectures, check_engines, find_teacher, model_files
from lora_grpo.runs import planned_settings, read_record, resumes, saved_bytes


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    config: RunConfig
    """The configuration before the search: without the settings that `complete_plan` derives from the GPU's memory."""
    engine: str
    """`peft` or `unsloth`."""
    work: Work
    derived: tuple[str, ...]
    """Names of the settings that the plan resolved."""
    assumptions: tuple[str, ...]
    measured: MeasuredEngine | None = None
    """The measurement by `check-gpu` that chose engine and sampling backend; None without one."""
    not_fitting: str = ""
    """The engine and sampling backend that `auto` would mean if they fit; empty if they do."""
    unused_gpus: int = 0
    """GPUs of this machine on which more processes could train."""
    not_planned: str | None = None
    """The reason why the memory is not planned; None if it is."""
    planner: Planner | None = None
    """None if the memory is not planned."""
    row_lengths: RowLengths | None = None
    """The lengths of the run's rows; None if the memory is planned for rows of the maximum length."""
    estimate: MemoryEstimate | None = None
    """The chosen batch sizes and their memory; None in a draft, or if the memory is not planned."""
    can_be_16_bits: bool = False
    """Whether the base can be loaded in 16 bits on a GPU; False for a checkpoint that is quantized."""
    choice: str | None = None
    """The bits and the checkpointing that the plan chose, and why, in one line; None in a draft and on a CPU."""
    disk_bytes: int | None = None
    """The size of checkpoints and adapters; None if the memory is not planned: the adapter's size is then unknown."""
    vocabulary: int | None = None
    """The number of tokens that the model has embeddings of; None if its configuration does not say."""
    least_gpu_memory_share: float | None = None
    """vLLM's smallest memory fraction, with room for one completion; None in a draft, and without vLLM."""
    is_resumed: bool = False
    """Whether a run is resumed, which keeps most of its settings."""
    too_large: str | None = None
    """The error message for requested settings that do not fit, with a suggestion; None if they fit."""

    @property
    def backend(self) -> str:
        """The sampling backend, `vllm` or `transformers`."""
        if self.planner and (starts_vllm(self.planner.sampler) or self.planner.sampler == "server"):
            return "vllm"
        return "transformers"

    @property
    def shape(self) -> Shape | None:
        return self.planner.shape if self.planner else None

    @property
    def longest_context(self) -> int:
        """The most tokens of prompt plus completion that fit; 0 if the memory is not planned."""
        if not self.planner:
            return 0
        return self.planner.longest_context(faster.with_least_memory(self.config))

    @property
    def length(self) -> int:
        """Tokens of the longest row in training that the memory is planned for."""
        step = Step(self.config, micro_batch_size=1, sequences=1, row_lengths=self.row_lengths)
        return step.trained_length  # does not depend on the batch sizes

    def check_disk(self) -> None:
        """Raise a UserError if the disk is too small for the files that the run has not written yet."""
        folder = self.config.folder
        disk.check_free_space(folder, (self.disk_bytes or 0) - saved_bytes(folder))

    def record(self) -> dict[str, Any]:
        """Return the entry `memory` of run.json, in GiB."""
        memory: dict[str, Any] = {"not_planned": self.not_planned}
        if self.estimate:
            memory = self.estimate.record()
        if self.choice:
            memory["choice"] = self.choice
        if self.least_gpu_memory_share is not None:
            memory["least_gpu_memory_share"] = self.least_gpu_memory_share
        return {"memory": {"derived": list(self.derived), "length": self.length, **memory}}


@dataclass(frozen=True)
class _Model:
    """The configuration of the model."""

    values: Mapping[str, Any]
    """The content of its config.json."""
    assumptions: tuple[str, ...] = ()
    """One line if the values come from the copy in lora_grpo, because the model's file cannot be read."""


def make_plan(config: RunConfig, invocation: Invocation) -> tuple[RunConfig, Plan]:
    """Plan a run whose rows have the maximum length; see `draft_plan` and `complete_plan`."""
    return complete_plan(draft_plan(config, invocation))


def draft_plan(config: RunConfig, invocation: Invocation) -> Plan:
    """Return the plan of a run without its memory, and its configuration with the engine and the sampling backend.

    With `invocation.plan` or `invocation.dry_run`, the GPU need not be present. With `invocation.resume`, finished
    steps are subtracted.

    Raises:
        UserError: the model cannot be trained, its configuration cannot be read, or an engine cannot be used.
    """
    device = _find_device(config, may_be_absent=invocation.plan or invocation.dry_run)
    model = _read_model(config, invocation)

    # What `auto` means, unless it does not fit and something else does. A resumed run keeps its settings.
    if resumes(config.folder, invocation):
        plan = _draft_plan(config, invocation, device, model)
        return dataclasses.replace(plan, derived=_with_planned_bits(plan))
    config = architectures.with_supported(config, model.values.get("model_type"))
    preferred = _draft_plan(config, invocation, device, model)
    if _fits(preferred):
        return preferred
    for other in _alternatives(config):
        try:
            plan = _draft_plan(other, invocation, device, model)
        except UserError:
            continue  # this machine cannot use it
        if _fits(plan):
            return dataclasses.replace(plan, not_fitting=f"{preferred.engine} with {preferred.backend}")
    return preferred  # `complete_plan` refuses it, and says what helps


def _with_planned_bits(plan: Plan) -> tuple[str, ...]:
    """Return the names in `Plan.derived`, with the bits of the base if they were planned when the run began."""
    if plan.is_resumed and "model.bits" in planned_settings(read_record(plan.config.folder)):
        return tuple(dict.fromkeys(("model.bits", *plan.derived)))
    return plan.derived


def _alternatives(config: RunConfig) -> list[RunConfig]:
    """Return configurations in which something that needs less memory takes the place of `auto`."""
    alternatives = []
    if config.model.engine == "auto":
        config = replace(config, {"model": {"engine": "peft"}})
        alternatives.append(config)
    asks_for_vllm = config.sampling.server_url is not None or config.model.gpu_memory_share is not None
    if config.sampling.backend == "auto" and not asks_for_vllm:
        alternatives.append(replace(config, {"sampling": {"backend": "transformers"}}))
    return alternatives


def _fits(plan: Plan) -> bool:
    """Return whether rows of the maximum length fit, as far as this can be planned."""
    if plan.planner is None:
        return True
    return plan.planner.choose(faster.with_least_memory(plan.config)) is not None


def _draft_plan(config: RunConfig, invocation: Invocation, device: Device, model: _Model) -> Plan:
    """Return `draft_plan` with the engine and the sampling backend that `config` names, or `auto` prefers."""
    if not device.is_present:
        config = with_gpu_defaults(config)
    is_resumed = resumes(config.folder, invocation)
    measured = None
    if device.is_present and not is_resumed:
        measured = measured_engine(config, device.name)
    if measured:
        # run.json then names both, so a later measurement does not change them when the run is resumed.
        config = replace(config, {"model": {"engine": measured.engine}, "sampling": {"backend": measured.backend}})
    engine = choose_engine(config)
    sampler: SamplerKind = sampler_kind(config)
    if device.on_cpu and sampler == "transformers" and not config.lora.dora:
        sampler = "merged"  # the built-in sampler on a copy of the model, into which it cannot merge DoRA
    if not is_resumed and not uses_vllm(config):
        for name in settings_of_vllm(config):
            raise UserError(
                f"{name} needs vLLM, and with `auto` this run samples without it; leave it out, or pass "
                "--sampling.backend vllm"
            )
    architectures.check_architecture(model.values, config.model, engine)
    if device.is_present:
        check_engines(config)

    # What is known without the model's dimensions.
    derived = _derived_settings(config, device, sampler)
    if device.on_cpu:
        config = faster.on_cpu(config)
    plan = Plan(
        config=config,
        engine=engine,
        work=Work.of(config, resumed=is_resumed),
        derived=derived,
        assumptions=(*model.assumptions, *_assumptions(config, device)),
        measured=measured,
        unused_gpus=_unused_gpus(config, device),
        is_resumed=is_resumed,
        vocabulary=_vocabulary(model.values),
    )
    if device.on_cpu and uses_vllm(config) and not config.sampling.server_url:
        return dataclasses.replace(plan, not_planned="vLLM's memory on a CPU is unknown")

    # The dimensions of the model and of its teacher, and with them a planner.
    try:
        shape = Shape.of(model.values)
    except UnknownFamily as error:
        return _not_planned(plan, device, str(error))
    shape.check_targets(config.lora.targets)
    try:
        teacher = _teacher_size(config, invocation, shape)
    except UnknownFamily as error:
        return _not_planned(plan, device, f"--teacher {config.teacher.name}: {error}")
    planner = Planner(
        shape=shape,
        device=device,
        sampler=sampler,
        unsloth_kernels=engine == "unsloth" and not device.on_cpu,
        packs=engine == "peft",
        teacher=teacher,
    )
    can_be_16_bits = not device.on_cpu and "quantization_config" not in model.values
    return dataclasses.replace(plan, planner=planner, can_be_16_bits=can_be_16_bits)


def _not_planned(plan: Plan, device: Device, reason: str) -> Plan:
    """Return a plan without memory, whose open settings need the least, or raise a UserError for those without default.

    Args:
        reason: why the memory cannot be planned, in one line.
    """
    without_default = [name for name in plan.derived if name in _WITHOUT_DEFAULT]
    if without_default:
        raise UserError(f"{reason}; pass {' and '.join(map(flag, without_default))}")
    if not device.on_cpu:
        plan = dataclasses.replace(plan, config=faster.with_least_memory(plan.config))
    return dataclasses.replace(plan, not_planned=reason)


def complete_plan(plan: Plan, row_lengths: RowLengths | None = None) -> tuple[RunConfig, Plan]:
    """Plan the memory of a run. Return its configuration, with the settings that depend on it, and the plan.

    Args:
        plan: the result of `draft_plan`.
        row_lengths: the lengths of the run's rows; by default, they have the maximum length.

    Raises:
        UserError: the run does not fit, or the rows have a token without an embedding.
    """
    plan = dataclasses.replace(plan, row_lengths=row_lengths)
    config = plan.config
    _check_tokens(plan)
    if not plan.planner:
        return config, plan

    planner = dataclasses.replace(plan.planner, row_lengths=row_lengths)
    choice = None
    if planner.device.on_cpu:
        estimate = planner.choose(config)
    else:
        choice = faster.choose(planner, config, can_be_16_bits=plan.can_be_16_bits)
        config = choice.config
        estimate = choice.estimate
    if estimate is None:
        raise UserError(refusal(planner, config, is_resumed=plan.is_resumed))
    least_share = None
    if estimate.gpu_memory_share is not None:
        least_share = planner.smallest(config).min_gpu_memory_share
    adapter = estimate.parts["adapter"]
    optimizer = estimate.parts["optimizer"]
    plan = dataclasses.replace(
        plan,
        planner=planner,
        estimate=estimate,
        choice=choice.line if choice else None,
        disk_bytes=disk_bytes(config, adapter, optimizer, planner.shape.vocabulary),
        least_gpu_memory_share=least_share,
        too_large=None if estimate.fits else refusal(planner, config, is_resumed=plan.is_resumed),
    )
    if planner.device.on_cpu:
        return config, plan  # no setting depends on the memory
    train = {"micro_batch_size": estimate.micro_batch_size}
    model = {"gpu_memory_share": estimate.gpu_memory_share}
    sampling: dict[str, Any] = {}
    if starts_vllm(estimate.sampler):
        sampling = {"engine_sleep": estimate.engine_sleeps}
    return replace(config, {"train": train, "model": model, "sampling": sampling}), plan


def _teacher_size(config: RunConfig, invocation: Invocation, shape: Shape) -> TeacherSize | None:
    """Return the size of the run's teacher; None without one.

    Raises:
        UnknownFamily: it has a base of its own, whose memory cannot be planned.
        UserError: it has a base of its own, which cannot be a teacher.
    """
    teacher = find_teacher(config, resumed=resumes(config.folder, invocation))
    if teacher is None:
        return None
    own_bits = None
    if teacher.base:
        fix = "pass the folder of a model as --teacher"
        values = _read_config(teacher.base, invocation, fix).values
        architectures.check_architecture(values, teacher.base, "peft", role="be a teacher")
        shape = Shape.of(values)
        own_bits = teacher.base.loaded_bits
    adapter_parameters = 0
    adapter = teacher.saved_adapter()
    if adapter:
        targets = adapter.target_modules
        names = tuple(targets) if isinstance(targets, list) else ("all-linear",)
        adapter_parameters = sum(shape.adapter_tensors(adapter.r, names, dora=adapter.use_dora))
    return TeacherSize(shape, own_bits, adapter_parameters)


def _read_model(config: RunConfig, invocation: Invocation) -> _Model:
    fix = "pass --model.name with a folder, or `--model.name starter` for the bundled model"
    return _read_config(config.model, invocation, fix)


def _read_config(settings: ModelConfig, invocation: Invocation, fix: str) -> _Model:
    """Return the configuration of a model. If the Hub is not available, a plan takes that of a known model."""
    name = settings.name
    try:
        return _Model(model_files.read_config(settings))
    except model_files.HubUnavailable as error:
        # --plan needs only the dimensions of the model. A dry run also reads its tokenizer.
        if not invocation.plan or name not in KNOWN_MODELS:
            raise UserError(f"{error}; {fix}") from None
        return _Model(KNOWN_MODELS[name], (f"the dimensions of {name} come from lora_grpo: {error}",))


def _vocabulary(model: Mapping[str, Any]) -> int | None:
    """Return the number of tokens that the model has embeddings of, if its config.json says."""
    for values in (model.get("text_config") or {}, model):
        size = values.get("vocab_size")
        if isinstance(size, int):
            return size
    return None


def _check_tokens(plan: Plan) -> None:
    """Raise a UserError if the rows have a token without an embedding."""
    if plan.row_lengths is None or not plan.vocabulary:
        return
    largest = plan.row_lengths.largest_token_id
    if largest >= plan.vocabulary:
        raise UserError(
            f"the tokenizer of {plan.config.model.name} uses token {largest}, but the model has embeddings of "
            f"0 to {plan.vocabulary - 1} only; use the model's own tokenizer, or resize its embeddings"
        )


def _find_device(config: RunConfig, *, may_be_absent: bool) -> Device:
    """Return the device to plan for.

    Args:
        may_be_absent: whether a GPU preset is planned for the GPU in its name if there is none.
    """
    gpus, _ = machine.nvidia_gpus()
    if uses_gpu(config):
        gpu = gpus[0]
        total = int(gpu.memory_gib * GIB)
        free = int(gpu.free_gib * GIB)
        host_total, host = machine.machine_memory()
        if config.processes > 1:
            # The processes start at different times and see different free memory, but must compute the same plan.
            free = total
            host = host_total // config.processes
        return Device(gpu.name, total, free, host=host, is_unified=gpu.is_unified)
    gigabytes = machine.preset_gigabytes(config.preset)
    if may_be_absent and gigabytes:
        size = gigabytes * GIB
        return Device(f"a GPU with {gigabytes} GB", total=size, free=size, is_present=False)
    total, free = machine.machine_memory()
    if config.processes > 1:  # they share it, and must compute the same plan
        total //= config.processes
        free = total
    return Device("this machine", total, free, on_cpu=True)


_WITHOUT_DEFAULT = ("train.micro_batch_size", "model.gpu_memory_share")
"""Settings that cannot be resolved if the memory is not planned."""


def _unused_gpus(config: RunConfig, device: Device) -> int:
    gpus, _ = machine.nvidia_gpus()
    if device.on_cpu or config.processes > 1:
        return 0
    return max(0, len(gpus) - 1)


def _derived_settings(config: RunConfig, device: Device, sampler: SamplerKind) -> tuple[str, ...]:
    """Return the names of the settings that the plan resolves by the device and its memory."""
    derived = []
    if config.model.bits == "auto":
        derived.append("model.bits")
    if config.train.gradient_checkpointing is None:
        derived.append("train.gradient_checkpointing")
    if device.on_cpu:
        return tuple(derived)
    if config.train.micro_batch_size is None:
        derived.append("train.micro_batch_size")
    if config.model.gpu_memory_share is None and starts_vllm(sampler):
        derived.append("model.gpu_memory_share")
    if config.sampling.engine_sleep is None and starts_vllm(sampler):
        derived.append("sampling.engine_sleep")
    return tuple(derived)


def _assumptions(config: RunConfig, device: Device) -> list[str]:
    """Return the assumptions of the plan, one line each."""
    assumptions = []
    if not device.is_present:
        assumptions.append(
            f"the GPU has {device.total / GIB:g} GiB, all of it free; no GPU was found on this machine, so engine and "
            "sampling backend are those of the `gpu` extra"
        )
    assumptions.append(
        f"every completion has its maximum length; {USABLE_FRACTION:g} of the free memory is usable "
        "(docs/before-you-train.md)"
    )
    if config.data.filter_by_difficulty or config.monitor.rows:
        assumptions.append("the samples of validation and of --data.filter-by-difficulty are not included in the work")
    if config.sampling.server_url:
        assumptions.append("the vLLM server's own memory is not included")
    return assumptions
