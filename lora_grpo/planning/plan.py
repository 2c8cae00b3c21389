"""What a run will take, before a weight is loaded: memory by part, what fits at most, steps, tokens and time.

From the model's config.json alone. A run that cannot fit is refused here, with what to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import (
    Invocation,
    RunConfig,
    choose_engine,
    flag,
    hardware,
    local_sampler,
    uses_vllm,
    with_gpu_defaults,
)
from lora_grpo.errors import UserError
from lora_grpo.models import GIB, Shape, UnknownFamily, base_model, memory, positive_int
from lora_grpo.planning.fit import USABLE_SHARE, Card, Fit, Planner
from lora_grpo.planning.plan_time import DECODING_SHARES, TRAINING_SHARE, Time, Work, estimate
from lora_grpo.planning.suggestions import advice, fit, refusal
from lora_grpo.runs import newest_step

DERIVED = ("train.micro_batch_size", "model.gpu_memory_share")
"""Settings that are worked out here where they are None; what the user names is taken as it is."""
_MOST = 1 << 24
"""No micro-batch or context is larger; where the search for the largest ends."""


@dataclass(frozen=True)
class Largest:
    """What would still fit, other settings as they are."""

    micro_batch_size: int
    """With as many completions at once as were chosen; it need not divide a step."""
    context: int
    """Longest prompt and completion in tokens, with the chosen micro-batch and completions at once; 0 for none."""
    context_at_least: int
    """The same with the smallest micro-batch and one completion at once: more is refused."""
    declared: int | None
    """The context that the model declares, `max_position_embeddings`."""


@dataclass(frozen=True)
class Plan:
    """A run before it begins."""

    model: str
    engine: str
    processes: int
    work: Work
    time: Time
    not_planned: str | None
    """Why there is nothing of the memory; None where it was planned."""
    shape: Shape | None
    fit: Fit | None
    largest: Largest | None
    too_large: str | None
    """What the user named does not fit: what is needed, and what to change; None where it fits."""
    instead: str | None
    """What to change alone; None where it fits."""
    derived: tuple[str, ...]
    """Settings that the plan worked out."""
    only_named: bool
    """The card is one of the size that the preset is named after; none is here."""
    assumptions: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Return what run.json says of it: `memory`, of a GPU, and `plan`; memory in GiB."""
        of_memory = self.fit.record() if self.fit else None
        on_gpu = self.fit is not None and not self.fit.card.on_cpu
        plan = {
            "memory": of_memory or {"not_planned": self.not_planned},
            "largest": dataclasses.asdict(self.largest) if self.largest else None,
            "work": {**dataclasses.asdict(self.work), "completions": self.work.completions, "tokens": self.work.tokens},
            "time": self.time.record(),
            "assumptions": list(self.assumptions),
        }
        return {"memory": {"derived": list(self.derived), **of_memory} if of_memory and on_gpu else None, "plan": plan}

    def lines(self) -> list[str]:
        """Say it in a few lines."""
        said = [f"memory: not planned: {self.not_planned}"] if self.not_planned else []
        if self.fit and self.largest:
            found, card = self.fit, self.fit.card
            share = f", vLLM's share {found.gpu_memory_share:g}" if found.gpu_memory_share else ""
            text = (
                f"memory: micro-batch {found.micro_batch_size} (at most {self.largest.micro_batch_size} would fit), "
                f"{found.max_num_seqs} completions at once{share}; planned {found.training / GIB:.1f} GiB training, "
                f"{found.drawing / GIB:.1f} GiB drawing, of {card.free / GIB:.1f} free"
            )
            said.append(text if found.fits else f"{text}: TOO LITTLE for what your settings ask; {self.instead}")
        work = self.work
        said.append(
            f"work: {work.steps} steps of {work.completions_per_step} completions, at most {count(work.tokens)} tokens"
        )
        said.append(f"time: {self.time.said()}")
        return said


def make_plan(config: RunConfig, how: Invocation) -> tuple[RunConfig, Plan]:
    """Work out what a run takes and what was left open for its GPU.

    Args:
        config: the checked configuration.
        how: whether it is planned alone (`--plan`), and goes on with a run.

    Returns:
        The configuration with nothing open, and the plan.

    Raises:
        UserError: the run does not fit, or the model's configuration cannot be read.
    """
    card, only_named = _card(config, how.plan)
    if only_named:
        config = with_gpu_defaults(config)
    engine, idle = choose_engine(config), local_sampler(config) == "transformers"
    derived = [
        name
        for name in (() if card.on_cpu else DERIVED)
        if _value(config, name) is None and not (idle and name == "model.gpu_memory_share")
    ]
    work = Work.of(config, newest_step(config.folder / "checkpoints") if how.resume else 0)
    shape = found = largest = too_large = instead = not_planned = None
    try:
        if card.on_cpu and uses_vllm(config) and not config.sampling.server_url:
            raise UserError("what vLLM takes on a CPU is not counted")
        values = base_model.read_config(config.model)
    except UserError as error:
        if derived:
            raise
        not_planned = str(error)
    else:
        try:
            shape = Shape.of(values)
        except UnknownFamily as error:
            if derived:
                raise UserError(f"{error}; pass {' and '.join(map(flag, derived))}") from None
            not_planned = str(error)
    if shape is not None:
        planner = Planner(shape, card, _sampler(config, card), fused=engine == "unsloth" and not card.on_cpu)
        found = fit(planner, config)
        longest = "max_position_embeddings"
        largest = _largest(
            planner, config, found, None if values.get(longest) is None else positive_int(values, longest)
        )
        if not found.fits:
            too_large, instead = refusal(planner, config), advice(planner, config)
        if not card.on_cpu:
            config = _settled(config, found)
    plan = Plan(
        model=config.model.name,
        engine=engine,
        processes=distributed.world_size(),
        work=work,
        time=estimate(config, work, shape, found, derived),
        not_planned=not_planned,
        shape=shape,
        fit=found,
        largest=largest,
        too_large=too_large,
        instead=instead,
        derived=tuple(derived),
        only_named=only_named,
        assumptions=tuple(_assumptions(config, card, found, only_named)),
    )
    return config, plan


def _card(config: RunConfig, only_planned: bool) -> tuple[Card, bool]:
    """Return the memory that is planned with, and whether only the preset's name says so."""
    gpus, _ = hardware.nvidia_gpus()
    if gpus:
        card = Card.of(gpus[0])
        # Processes that start at different times find different amounts free, and have to come to the same numbers.
        return (dataclasses.replace(card, free=card.total) if distributed.world_size() > 1 else card), False
    if only_planned and (gigabytes := hardware.preset_gigabytes(config.preset)):
        return Card(f"a GPU with {gigabytes} GB", gigabytes * GIB, gigabytes * GIB), True
    return Card("this machine", *hardware.machine_memory(), on_cpu=True), False


def _sampler(config: RunConfig, card: Card) -> memory.SamplerKind:
    """Return what draws: on a CPU the kit's own sampler has an unpacked copy where the adapter is plain."""
    return "merged" if card.on_cpu and not config.lora.dora else local_sampler(config)


def _settled(config: RunConfig, found: Fit) -> RunConfig:
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, micro_batch_size=found.micro_batch_size),
        model=dataclasses.replace(config.model, gpu_memory_share=found.gpu_memory_share),
    )


def _largest(planner: Planner, config: RunConfig, found: Fit, declared: int | None) -> Largest:
    """Search for the largest micro-batch and context that fit."""

    def with_context(longest: int) -> RunConfig:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, max_sequence_tokens=longest))

    def fits(longest: int) -> bool:
        return planner.fits(with_context(longest), found.micro_batch_size, found.max_num_seqs)

    def micro_fits(micro: int) -> bool:
        return planner.fits(config, micro, found.max_num_seqs)

    return Largest(
        micro_batch_size=_highest(micro_fits),
        context=_highest(fits, above=config.sampling.max_completion_tokens),
        context_at_least=_highest(
            lambda longest: planner.smallest_fits(with_context(longest)), above=config.sampling.max_completion_tokens
        ),
        declared=declared,
    )


def _highest(holds: Callable[[int], bool], above: int = 0) -> int:
    """Return the largest number for which it holds, 0 for none; it holds for all between one such and `above`."""
    low, high = above, above + 1
    while high < _MOST and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low if low > above else 0


def _assumptions(config: RunConfig, card: Card, found: Fit | None, only_named: bool) -> Iterator[str]:
    """Yield everything that is taken for granted."""
    if only_named:
        yield f"the GPU has {card.total / GIB:g} GiB and all of it is free; no GPU is here to be asked"
        yield "engine and sampler are those of the `gpu` extra where the settings leave them open"
    yield "every prompt and every completion is as long as the settings allow"
    if config.data.filter_by_difficulty:
        yield "the samples by which --data.filter-by-difficulty chooses its rows are not counted"
    if config.monitor.rows:
        yield f"the watch's passes over at most {config.monitor.rows} held-out rows are not counted"
    if found is None:
        return
    if card.on_cpu:
        yield f"{memory.LIBRARIES / GIB:g} GiB for Python and the libraries, measured on one machine"
        yield f"{USABLE_SHARE:g} of the available memory can be used (a guess); a container's own limit is not read"
    else:
        yield f"{USABLE_SHARE:g} of the free memory can be used (a guess)"
        context, workspace = memory.CONTEXT / GIB, memory.WORKSPACE / GIB
        yield f"{context:.1f} GiB for CUDA's context and {workspace:.1f} GiB of workspace (guesses)"
        yield "activations in 16 bits; attention by a kernel that keeps no square of scores"
    if found.sampler in ("vllm", "shared"):
        graphs = memory.VLLM_WORKSPACE / GIB
        yield f"{graphs:.1f} GiB for vLLM's graphs and activations (a guess); it sleeps while training"
    if config.sampling.server_url:
        yield "the vLLM server's own memory is not in it"
    if not card.on_cpu:
        low, high = DECODING_SHARES[found.sampler]
        yield (
            f"time: decoding reaches {low:g} to {high:g}, training {TRAINING_SHARE[0]:g} to {TRAINING_SHARE[1]:g} of "
            "the stated rates (guesses: no GPU was measured); loading and rewards are not in it"
        )


def _value(config: RunConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def count(number: float) -> str:
    """Write a count to three digits: 16.4 million."""
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {word}"
    return f"{number:,.0f}"
