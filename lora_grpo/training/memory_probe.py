"""Try the largest micro-batch of a run before its first step, so that a run that is too large fails early."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from lora_grpo.config import RunConfig, micro_batches
from lora_grpo.errors import RunError
from lora_grpo.models import GIB, memory
from lora_grpo.planning import as_flags, cheaper_settings
from lora_grpo.sampling import ran_out_of_memory
from lora_grpo.training.sft import sft_inputs
from lora_grpo.training.trl_compat import copy_without_metrics, synthetic_inputs


def probe(trainer: Any, config: RunConfig, longest_prompt_tokens: int) -> dict[str, Any] | None:
    """Run a forward and backward pass over a micro-batch of maximum length, and restore the state.

    The pass uses the trainer's own `compute_loss` and its accelerator's `backward`. Gradients and the optimizer state
    have their full size, as they do from the second step on. Called in transformers' `on_train_begin`, where the model
    is wrapped as in training and has no gradients.

    Returns:
        The GPU memory that the pass used, or None on a CPU.

    Raises:
        RunError: out of memory.
    """
    import torch

    device = next(trainer.model.parameters()).device
    on_gpu = device.type == "cuda"
    rows, completion = trainer.args.per_device_train_batch_size, config.sampling.max_completion_tokens
    stand_in, failure, held = copy_without_metrics(trainer), "", []
    with torch.random.fork_rng(devices=[device] if on_gpu else []), _asleep(trainer.model):
        torch.cuda.empty_cache()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        trainer.model.train()
        try:
            trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            if not (trainer.optimizer and trainer.optimizer.state_dict()["state"]):  # not a resumed run
                size = sum(memory.optimizer_bytes(each.numel(), config.train.optimizer) for each in trained)
                held.append(torch.empty(size, dtype=torch.uint8, device=device))
            if config.method == "sft":
                held.append(sft_inputs(rows, longest_prompt_tokens + completion, completion, device))
            else:
                held.append(synthetic_inputs(trainer, rows, longest_prompt_tokens, device))
            held.append(stand_in.compute_loss(trainer.model_wrapped, held[-1]))
            trainer.accelerator.backward(held[-1])
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            failure = " ".join(str(error).split())
        used = {}
        if on_gpu:
            free, total = torch.cuda.mem_get_info(device)
            used = {
                "peak_allocated_gib": round(torch.cuda.max_memory_allocated(device) / GIB, 2),
                "peak_reserved_gib": round(torch.cuda.max_memory_reserved(device) / GIB, 2),
                "gpu_used_gib": round((total - free) / GIB, 2),
                "gpu_total_gib": round(total / GIB, 2),
            }
        # The error and the frames that referenced the batch are gone. Free the memory before the engine wakes up.
        held.clear()
        trainer.model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    if failure:
        fixes = [
            f"pass --resume --train.micro-batch-size {size} (same result, slower)"
            for size in micro_batches(config)
            if size < rows
        ][:1]
        cheaper = [values[0] for values in cheaper_settings(config) if "train.micro_batch_size" not in values[0]]
        fixes.append(f"start over with --overwrite {' or '.join(map(as_flags, cheaper[:2]))}")
        raise RunError(
            f"out of memory in a pass over {rows} completions of {longest_prompt_tokens} + {completion} tokens: "
            f"{', or '.join(fixes)} ({failure})"
        )
    return {"rows": rows, "prompt_tokens": longest_prompt_tokens, **used} if used else None


@contextlib.contextmanager
def _asleep(model: Any) -> Iterator[None]:
    """Put the vLLM engine that shares its weights with Unsloth to sleep, as Unsloth's trainer does."""
    engine: Any = getattr(model, "vllm_engine", None)
    can_sleep = engine is not None and engine.llm_engine.vllm_config.model_config.enable_sleep_mode
    if not can_sleep or engine.llm_engine.is_sleeping():
        yield
        return
    engine.sleep(1)
    try:
        yield
    finally:
        engine.wake_up()
