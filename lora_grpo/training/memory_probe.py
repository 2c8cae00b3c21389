"""A trial of the largest micro-batch that a run can meet, before its first step: memory runs out here or not at all."""

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

    It goes through the trainer's own `compute_loss` and its accelerator's `backward`, on inputs made up here: whatever
    the engine, the loss and the settings make of a batch, what is measured is what will run. `training_step` is left
    out because it would draw completions first and count itself as a step. Gradients and the optimiser's state are
    there at their full size, as they are from the second pass on. One token of padding makes the attention mask that a
    batch of real prompts has.

    Nothing is changed: the pass runs on a shallow copy of the trainer that counts for itself; gradients, training mode
    and random states are put back; no optimiser steps. A micro-batch that does not fit is not lowered: its size is a
    setting of the run, and the message says which ones would do.

    To be called where the trainer trains next, with the model wrapped as it will be (transformers' `on_train_begin`).
    An engine that shares the card has to sleep, as it does while the trainer trains; Unsloth's is put to sleep here.

    Args:
        trainer: what `make_trainer` returned.
        config: the run.
        longest_prompt_tokens: of all training rows.

    Returns:
        On a GPU what the pass took of it; None on a CPU.

    Raises:
        RunError: memory does not suffice; says what was measured and what to change.
    """
    import torch

    model = trainer.model_wrapped
    device = next(trainer.model.parameters()).device
    rows = trainer.args.per_device_train_batch_size
    asked = f"{rows} completions of {longest_prompt_tokens} + {config.sampling.max_completion_tokens} tokens"
    stand_in = copy.copy(trainer)
    stand_in._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
    stand_in.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    told, held = None, []
    with _undone(trainer.model, device), _asleep(trainer.model):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        try:
            held.append(_optimizer_state(trainer, config.train.optimizer, device))
            trainer.model.train()
            held.append(stand_in.compute_loss(model, synthetic_inputs(trainer, rows, longest_prompt_tokens, device)))
            trainer.accelerator.backward(held[-1])
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            told = " ".join(str(error).split())
        measured = _measured(device)
        # The error, and the frames that held the batch, are gone. An engine may only wake when the memory is free.
        held.clear()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # gradients, too, are gone now
        torch.cuda.reset_peak_memory_stats(device)
    if told is not None:
        raise RunError(_refusal(config, rows, asked, measured, told))
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
    """Give every parameter the gradient of an earlier pass, and return a block as large as the state to come."""
    import torch

    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    there = trainer.optimizer is not None and bool(trainer.optimizer.state_dict()["state"])  # a resumed run's
    size = 0 if there else sum(memory.optimizer_bytes(parameter.numel(), name) for parameter in trained)
    return torch.empty(size, dtype=torch.uint8, device=device)


@contextlib.contextmanager
def _undone(model: Any, device: Any) -> Iterator[None]:
    """Put gradients, training mode and random states back."""
    import numpy as np
    import torch

    gradients = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.requires_grad]
    modes = [(module, module.training) for module in model.modules()]
    others = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(others[0])
        np.random.set_state(others[1])
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _asleep(model: Any) -> Iterator[None]:
    """Let the engine that Unsloth shares the weights with sleep meanwhile, where it can, as its trainer does."""
    engine = getattr(model, "vllm_engine", None)
    if engine is None or not engine.llm_engine.vllm_config.model_config.enable_sleep_mode:
        yield
        return
    was_asleep = engine.llm_engine.is_sleeping()
    if not was_asleep:
        engine.sleep(1)
    try:
        yield
    finally:
        if not was_asleep:
            engine.wake_up()


def _measured(device: Any) -> dict[str, float] | None:
    """Return the peak of what tensors took and of what torch held for them, and all that is taken now, in GiB."""
    import torch

    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    figures = {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device),
        "peak_reserved_gib": torch.cuda.max_memory_reserved(device),
        "gpu_used_gib": total - free,
        "gpu_total_gib": total,
    }
    return {name: round(size / GIB, 2) for name, size in figures.items()}


def _refusal(config: RunConfig, rows: int, asked: str, measured: dict[str, float] | None, told: str) -> str:
    smaller = [size for size in micro_batches(config) if size < rows][:1]
    others = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=None))
    again = [as_flags(values[0]) for values in cheaper_settings(others)][: 3 - len(smaller)]
    fixes = [f"go on with --resume --train.micro-batch-size {size} (the same result, slower)" for size in smaller]
    fixes.append(f"begin anew with --overwrite {' or '.join(again)}")
    figures = (
        f"tensors took {measured['peak_allocated_gib']} GiB and the GPU had {measured['gpu_total_gib']}; "
        if measured
        else ""
    )
    return f"memory does not suffice for a pass over {asked}: {figures}{', or '.join(fixes)} ({told})"
