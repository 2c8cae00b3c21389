"""The highest GPU memory in each phase of a training step, to be compared with the plan's.

    start ─► None ─► sampling ─► scoring ─► loss ─► backward ─► loss ─► backward ─► (log) ─► sampling ...

The phases are those of `memory/estimate.py`. `scoring` is everything between sampling and the first loss, `backward`
also contains the optimizer's step. With a teacher, `teacher` comes before each loss. Some steps end with a
`validation`, which no plan counts.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from lora_grpo.config import RunConfig, smaller_micro_batch
from lora_grpo.memory import GIB

_TOLERANCE = 1.1
"""A phase exceeds its plan if its peak is larger by more than this factor."""

START_OVER = "start over with a smaller --sampling.max-completion-tokens"
"""Advice if nothing that a resumed run may change needs less memory."""

_SAMPLING = ("sampling", "validation")
"""The phases in which a vLLM engine that sleeps between them is awake."""


class GpuCounters:
    """torch's counters of the current GPU, in bytes."""

    def allocated_peak(self) -> int:
        """Return the most that tensors took since the last reset."""
        import torch

        return torch.cuda.max_memory_allocated()

    def reserved_peak(self) -> int:
        """Return the most that torch held since the last reset: for tensors, and freed for the next ones."""
        import torch

        return torch.cuda.max_memory_reserved()

    def reserved(self) -> int:
        """Return what torch holds now."""
        import torch

        return torch.cuda.memory_reserved()

    def used(self) -> int:
        """Return what all processes use of the GPU now."""
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free

    def reset(self) -> None:
        """Reset the peaks."""
        import torch

        torch.cuda.reset_peak_memory_stats()


class PhasePeaks:
    """Measures the phases of a step. Without counters, it does nothing.

    A peak is that of torch's tensors, plus what the process uses outside of torch: CUDA's context, kernels. A vLLM
    engine that sleeps has returned memory to the GPU which torch still counts as its own. The part outside of torch is
    then smaller by as much, so that the sum is right. It is not smaller while vLLM samples, but it can only be measured
    after vLLM sleeps again; so sampling, also in a validation, takes the largest part that was seen, which is that
    after the engine's start.

    Args:
        counters: None on a CPU.
        used_by_others: bytes of the GPU that other processes use.
    """

    def __init__(self, counters: GpuCounters | None = None, used_by_others: int = 0) -> None:
        self._counters = counters
        self._used_by_others = used_by_others
        self._largest_outside = 0
        self._phase: str | None = None
        self._step: dict[str, int] = {}
        """Peaks of this step, in bytes."""
        self._step_reserved: dict[str, int] = {}
        self.highest: dict[str, int] = {}
        """Peaks of all steps and of `start`, in bytes."""
        self.highest_allocated = 0
        """The most that torch's tensors took so far, in or between phases, in bytes."""

    def end_start(self) -> int | None:
        """Return the peak since the start of the process, in which the engines started. Call it before any phase."""
        if self._counters is None:
            return None
        self._phase = "start"
        self.enter(None)
        self._step.clear()
        self._step_reserved.clear()
        return self.highest["start"]

    @contextlib.contextmanager
    def phase(self, name: str, then: str | None = None) -> Iterator[None]:
        """Measure the block as a phase, and what follows it as the phase `then`; not at all with None."""
        self.enter(name)
        yield
        self.enter(then)

    def enter(self, phase: str | None) -> None:
        """End the current phase and begin another."""
        counters = self._counters
        if counters is None:
            return
        self.highest_allocated = max(self.highest_allocated, counters.allocated_peak())
        outside = counters.used() - self._used_by_others - counters.reserved()
        self._largest_outside = max(self._largest_outside, outside)
        if self._phase in _SAMPLING:
            outside = self._largest_outside
        if self._phase:
            peak = counters.allocated_peak() + outside
            reserved_peak = counters.reserved_peak() + outside
            self._step[self._phase] = max(peak, self._step.get(self._phase, 0))
            self._step_reserved[self._phase] = max(reserved_peak, self._step_reserved.get(self._phase, 0))
            self.highest[self._phase] = max(peak, self.highest.get(self._phase, 0))
        counters.reset()
        self._phase = phase

    def end_step(self) -> dict[str, float]:
        """End the current phase. Return the metrics of the step in GiB: `memory/PHASE` and `memory/PHASE_reserved`."""
        self.enter(None)
        metrics = {}
        for phase, peak in self._step.items():
            metrics[f"memory/{phase}"] = peak / GIB
            metrics[f"memory/{phase}_reserved"] = self._step_reserved[phase] / GIB
        self._step.clear()
        self._step_reserved.clear()
        return metrics


def peaks_of_run(record: Mapping[str, Any]) -> PhasePeaks:
    """Return the peaks of a run, with what other processes used when it was planned, from its run.json.

    In a memory that GPU and CPU share, nothing is measured: what the run takes outside of torch cannot be told from
    what the machine takes.
    """
    import torch

    if not torch.cuda.is_available():
        return PhasePeaks()
    plan = record.get("memory", {})
    if plan.get("is_unified"):
        return PhasePeaks()
    used_by_others = 0.0
    if plan.get("gpu") == torch.cuda.get_device_name():
        used_by_others = plan["total_gib"] - plan["free_gib"]
    return PhasePeaks(GpuCounters(), int(used_by_others * GIB))


def excess(config: RunConfig, plan: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return a warning for each phase of a step that took more GPU memory than planned, by phase.

    Args:
        config: of the run, with the planned settings.
        plan: the entry `memory` of run.json.
        metrics: of the step.
    """
    warnings = {}
    for phase, planned in plan.get("planned_phases_gib", {}).items():
        measured = metrics.get(f"memory/{phase}", 0.0)
        if measured > _TOLERANCE * planned:
            warnings[phase] = (
                f"warning: {phase} took {measured:.2f} GiB of GPU memory, {planned:.2f} were planned and "
                f"{plan['free_gib']:.2f} are free; if a step runs out of memory, {_advice(phase, config, plan)}"
            )
    return warnings


def _advice(phase: str, config: RunConfig, plan: Mapping[str, Any]) -> str:
    """Return what makes a phase smaller: a setting that a resumed run may change or, without one, another run."""
    if phase == "sampling":
        share = plan["gpu_memory_share"]
        if share:
            smaller_share = round(0.8 * share, 2)
            if plan["least_gpu_memory_share"] <= smaller_share < share:
                return f"pass --resume --model.gpu-memory-share {smaller_share:.2f}"
        return START_OVER
    if not plan["engine_sleeps"]:
        return "pass --resume --sampling.engine-sleep"
    smaller_batch = smaller_micro_batch(config)
    if smaller_batch:
        return f"pass --resume --train.micro-batch-size {smaller_batch}"
    return START_OVER
