"""A trial of the largest micro-batch of a run before its first step, so that memory runs out here or not at all."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from lora_grpo.config import RunConfig, micro_batches
from lora_grpo.errors import RunError
from lora_grpo.models import GIB, memory
from lora_grpo.planning import as_flags, cheaper_settings
from lora_grpo.sampling import ran_out_of_memory


def probe(trainer: Any, config: RunConfig, longest_prompt_tokens: int) -> dict[str, Any] | None:
    """Run one forward and backward pass over a micro-batch of the longest prompts and completions, and undo it.

    The pass goes through the trainer's own `compute_loss` and its accelerator's `backward`, so it takes what training
    takes with any engine, loss and settings; not through `training_step`, which would sample and count a step.
    Gradients and the optimizer's state have their full size, as from the second step on. One token of padding makes the
    attention mask that real batches have.

    It runs on a shallow copy of the trainer; gradients, training mode and random states are restored. A micro-batch
    that does not fit is not lowered, because it is a setting: the message says which would fit.

    Called in transformers' `on_train_begin`, where the model is wrapped as in training. An engine that shares the GPU
    must sleep, as it does in training; Unsloth's is put to sleep here.

    Args:
        trainer: from `make_trainer`.
        config: the run's.
        longest_prompt_tokens: of all training rows.

    Returns:
        The GPU memory that the pass took; None on a CPU.

    Raises:
        RunError: out of memory; the message has the measurements and what to change.
    """
    import torch

    model, device = trainer.model_wrapped, next(trainer.model.parameters()).device
    on_gpu = device.type == "cuda"
    rows = trainer.args.per_device_train_batch_size
    stand_in = copy.copy(trainer)
    stand_in._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
    stand_in.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    failure, held = None, []

    def empty_cache() -> None:
        if on_gpu:
            torch.cuda.empty_cache()

    with _restored(trainer.model, device), _asleep(trainer.model):
        empty_cache()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            held.append(_optimizer_state(trainer, config.train.optimizer, device))
            trainer.model.train()
            held.append(stand_in.compute_loss(model, synthetic_inputs(trainer, rows, longest_prompt_tokens, device)))
            trainer.accelerator.backward(held[-1])
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            failure = " ".join(str(error).split())
        measured = _measured(device) if on_gpu else None
        # The error and the frames that held the batch are gone. The engine may only wake up once the memory is free.
        held.clear()
        gc.collect()
        empty_cache()
    empty_cache()  # of gradients
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    if failure is not None:
        batch = f"{rows} completions of {longest_prompt_tokens} + {config.sampling.max_completion_tokens} tokens"
        raise RunError(_message(config, rows, batch, measured, failure))
    return measured and {"rows": rows, "prompt_tokens": longest_prompt_tokens, **measured}


def synthetic_inputs(trainer: Any, rows: int, prompt: int, device: Any) -> dict[str, Any]:
    """Return what TRL 1.14's `_generate_and_score_completions` would, for a micro-batch of rows at their longest."""
    import torch

    multiple = trainer.pad_to_multiple_of or 1
    prompt, completion = (-(-length // multiple) * multiple for length in (prompt, trainer.max_completion_length))
    inputs = {
        "prompt_ids": torch.ones(rows, prompt, dtype=torch.long, device=device),
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long, device=device),
        "completion_ids": torch.ones(rows, completion, dtype=torch.long, device=device),
        "completion_mask": torch.ones(rows, completion, dtype=torch.long, device=device),
        "advantages": torch.ones(rows, device=device),
        "num_items_in_batch": torch.tensor(rows * completion, device=device),
    }
    if prompt > 1:
        inputs["prompt_mask"][0, 0] = 0
    if trainer.beta:
        inputs["ref_per_token_logps"] = torch.zeros(rows, completion, device=device)
    if trainer.use_vllm:
        inputs["importance_sampling_ratio"] = torch.ones(rows, completion, device=device)
    return inputs


def _optimizer_state(trainer: Any, name: str, device: Any) -> Any:
    """Give every parameter a gradient, and return a block as large as the optimizer's state will be."""
    import torch

    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    exists = trainer.optimizer is not None and bool(trainer.optimizer.state_dict()["state"])  # of a resumed run
    size = 0 if exists else sum(memory.optimizer_bytes(parameter.numel(), name) for parameter in trained)
    return torch.empty(size, dtype=torch.uint8, device=device)


@contextlib.contextmanager
def _restored(model: Any, device: Any) -> Iterator[None]:
    """Restore gradients, training mode and random states at the end."""
    import numpy as np
    import torch

    gradients = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.requires_grad]
    modes = [(module, module.training) for module in model.modules()]
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _asleep(model: Any) -> Iterator[None]:
    """Put the engine that Unsloth shares the weights with to sleep, as its trainer does."""
    engine: Any = getattr(model, "vllm_engine", None)
    can_sleep = engine is not None and engine.llm_engine.vllm_config.model_config.enable_sleep_mode
    if not can_sleep or engine.llm_engine.is_sleeping():
        yield
    else:
        engine.sleep(1)
        try:
            yield
        finally:
            engine.wake_up()


def _measured(device: Any) -> dict[str, float]:
    """Return peak tensor memory, torch's peak reservation and the GPU's memory, in GiB."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    sizes = {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device),
        "peak_reserved_gib": torch.cuda.max_memory_reserved(device),
        "gpu_used_gib": total - free,
        "gpu_total_gib": total,
    }
    return {name: round(size / GIB, 2) for name, size in sizes.items()}


def _message(config: RunConfig, rows: int, batch: str, measured: dict[str, float] | None, failure: str) -> str:
    smaller = [size for size in micro_batches(config) if size < rows][:1]
    without = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=None))
    cheaper = [as_flags(values[0]) for values in cheaper_settings(without)][: 3 - len(smaller)]
    fixes = [f"pass --resume --train.micro-batch-size {size} (same result, slower)" for size in smaller]
    fixes.append(f"start over with --overwrite {' or '.join(cheaper)}")
    figures = (
        f"tensors took {measured['peak_allocated_gib']} GiB of the GPU's {measured['gpu_total_gib']}; "
        if measured
        else ""
    )
    return f"out of memory in a pass over {batch}: {figures}{', or '.join(fixes)} ({failure})"
