"""Run a recipe as `python recipe.py FLAGS` would, inside the small card of the environment, and record its memory.

    python tools/on_card/watched.py RECORD recipes/gsm8k_lora.py FLAGS

RECORD is a JSON file: the phases of the run, and with a GPU their peaks with the code that held the memory
(memory_trace.py). With `-`, nothing is recorded: torch then allocates as fast as without it.
"""

import contextlib
import functools
import json
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

from on_card import memory_trace, small_card
from on_card.memory_trace import Phase

_MAX_EVENTS = 1_000_000
"""Allocations and releases in torch's record; the oldest are dropped."""

_FOREVER_US = 2**62


def main() -> None:
    record_file, recipe, *flags = sys.argv[1:]
    small_card.tell_python()
    sys.argv = [recipe, *flags]
    if record_file == "-":
        runpy.run_path(recipe, run_name="__main__")
        return
    phases: list[Phase] = []
    _record_phases(phases)
    _start_record_with_model()
    try:
        runpy.run_path(recipe, run_name="__main__")
    finally:  # a recipe ends with sys.exit, or with an error that the record explains
        Path(record_file).write_text(json.dumps(_summary(phases)), encoding="utf-8")


def _start_record_with_model() -> None:
    """Start torch's record when the model is loaded: Unsloth, imported before, sets how torch allocates."""
    from lora_grpo.models import policy, unsloth_policy

    def record_first(owner: Any, name: str) -> None:
        load = getattr(owner, name)

        @functools.wraps(load)
        def start_and_load(*args: Any, **kwargs: Any) -> Any:
            import torch

            if torch.cuda.is_available():
                torch.cuda.init()  # the record is kept by each card's allocator
                torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_MAX_EVENTS)
            return load(*args, **kwargs)

        setattr(owner, name, start_and_load)

    record_first(unsloth_policy, "load_unsloth")
    record_first(policy, "load_peft")


def _summary(phases: list[Phase]) -> dict[str, Any]:
    """Return `phases` and `events`, the number of allocations and releases.

    Without a GPU, phases have no memory. With one, the first phase is the whole run, and `record_seconds` says when the
    record begins and ends, counted from the first phase: both come from one clock.
    """
    import torch

    if not torch.cuda.is_available():
        names = dict.fromkeys(phase.name for phase in phases)
        counted = [{"phase": name, "times": sum(phase.name == name for phase in phases)} for name in names]
        return {"phases": counted, "events": 0}
    snapshot = torch.cuda.memory._snapshot()
    events = snapshot["device_traces"][0]
    start = min((phase.begin_us for phase in phases), default=0)
    return {
        "phases": memory_trace.peaks(snapshot, [Phase("whole run", 0, _FOREVER_US), *phases]),
        "events": len(events),
        "record_seconds": [round((event["time_us"] - start) / 1e6, 1) for event in (*events[:1], *events[-1:])],
    }


def _record_phases(phases: list[Phase]) -> None:
    """Add a phase for each call of what a run does, from loading the model to the optimizer."""
    from lora_grpo import pipeline
    from lora_grpo.monitoring import StepMetrics
    from lora_grpo.training import prepare

    @contextlib.contextmanager
    def recorded(name: str) -> Iterator[None]:
        begin = time.time_ns() // 1000  # the clock of torch's record
        try:
            yield
        finally:
            phases.append(Phase(name, begin, time.time_ns() // 1000))

    def record_calls(owner: Any, name: str, phase: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with recorded(phase):
                return function(*args, **kwargs)

        setattr(owner, name, call)

    record_calls(pipeline, "load_policy", "load the model")  # and vLLM, with Unsloth
    record_calls(pipeline, "build_sampler", "start the sampler")
    record_calls(prepare, "check_logprobs", "logprob check")

    # Rollouts, rewards, and whatever else the trainer times.
    timed = StepMetrics.timed

    @contextlib.contextmanager
    def timed_and_recorded(metrics: Any, phase: str) -> Iterator[None]:
        with timed(metrics, phase), recorded(phase):
            yield

    setattr(StepMetrics, "timed", timed_and_recorded)  # noqa: B010 - mypy refuses the plain form

    prepare_training = pipeline.prepare_training

    def prepare_recorded(*args: Any, **kwargs: Any) -> Any:
        training = prepare_training(*args, **kwargs)
        trainer = training.trainer
        _record_scoring(trainer, recorded)
        record_calls(trainer, "compute_loss", "loss")
        record_calls(trainer.accelerator, "backward", "backward")
        return training

    pipeline.prepare_training = prepare_recorded


def _record_scoring(trainer: Any, recorded: Any) -> None:
    """Record passes for logprobs without gradients; those with gradients belong to the loss."""
    import torch

    name = "_get_per_token_logps_and_entropies"
    function = getattr(trainer, name)

    @functools.wraps(function)
    def score(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return function(*args, **kwargs)
        with recorded("scoring"):
            return function(*args, **kwargs)

    setattr(trainer, name, score)


if __name__ == "__main__":
    main()
