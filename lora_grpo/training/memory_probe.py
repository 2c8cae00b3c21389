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
    rows = trainer.args.per_device_train_batch_size
    stand_in, failure, held = copy_without_metrics(trainer), None, []
    with torch.random.fork_rng(devices=[device] if on_gpu else []), _asleep(trainer.model):
        torch.cuda.empty_cache()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        trainer.model.train()
        try:
            held.append(_optimizer_state(trainer, config.train.optimizer, device))
            if config.method == "sft":
                completion = config.sampling.max_completion_tokens
                held.append(sft_inputs(rows, longest_prompt_tokens + completion, completion, device))
            else:
                held.append(synthetic_inputs(trainer, rows, longest_prompt_tokens, device))
            held.append(stand_in.compute_loss(trainer.model_wrapped, held[-1]))
            trainer.accelerator.backward(held[-1])
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            failure = " ".join(str(error).split())
        measured = _measured(device) if on_gpu else None
        # The error and the frames that referenced the batch are gone. Free the memory before the engine wakes up.
        held.clear()
        trainer.model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    if failure is not None:
        batch = f"{rows} completions of {longest_prompt_tokens} + {config.sampling.max_completion_tokens} tokens"
        figures = f"tensors took {measured['peak_allocated_gib']} GiB; " if measured else ""
        raise RunError(f"out of memory in a pass over {batch}: {figures}{_fixes(config, rows)} ({failure})")
    return measured and {"rows": rows, "prompt_tokens": longest_prompt_tokens, **measured}


def _optimizer_state(trainer: Any, name: str, device: Any) -> Any:
    """Allocate a gradient for every trained parameter, and return a tensor as large as the optimizer state."""
    import torch

    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    exists = trainer.optimizer is not None and bool(trainer.optimizer.state_dict()["state"])  # resumed run
    size = 0 if exists else sum(memory.optimizer_bytes(parameter.numel(), name) for parameter in trained)
    return torch.empty(size, dtype=torch.uint8, device=device)


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


def _measured(device: Any) -> dict[str, float]:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    sizes = {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device),
        "peak_reserved_gib": torch.cuda.max_memory_reserved(device),
        "gpu_used_gib": total - free,
        "gpu_total_gib": total,
    }
    return {name: round(size / GIB, 2) for name, size in sizes.items()}


def _fixes(config: RunConfig, rows: int) -> str:
    smaller = [size for size in micro_batches(config) if size < rows][:1]
    fixes = [f"pass --resume --train.micro-batch-size {size} (same result, slower)" for size in smaller]
    cheaper = [values[0] for values in cheaper_settings(config) if "train.micro_batch_size" not in values[0]]
    fixes.append(f"start over with --overwrite {' or '.join(map(as_flags, cheaper[:2]))}")
    return ", or ".join(fixes)
