"""Starts a vLLM engine in this process."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError
from lora_grpo.models import base_model
from lora_grpo.optional import require
from lora_grpo.sampling.merged_copy import plain_copy
from lora_grpo.sampling.vllm_engine import VllmEngine, reason

_CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Otherwise the first logprobs wait up to half a minute for a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
}
_SETTINGS = {
    # Run the engine in this process, so that it ends with it; on a CPU it then uses torch's own, unpinned threads.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # otherwise determined by connecting to the internet
}
_CPU_ENGINE = {
    "enforce_eager": True,
    # Each chunk of a prompt samples a token that is discarded, and a CPU's random generator cannot step back.
    "enable_chunked_prefill": False,
    # Samples share the full blocks of their prompt; few prompts fill the default of 128 tokens.
    "block_size": 32,
    "max_num_seqs": 128,
}
_CPU_BATCH_TOKENS = 512
"""Tokens per prefill batch; the adapter's matrices are copied for each of them."""
_GPU_BATCH_TOKENS = 4096
"""The same on a GPU, which a few prompts at once fill."""
_WORKER_VARIABLES = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS")
"""Environment variables that vLLM sets for worker processes; graded programs would inherit them."""


def can_quantize() -> bool:
    """Return whether this vLLM serves NF4 itself, on a GPU; version 0.28 moved that to a separate package."""
    try:
        loader = importlib.util.find_spec("vllm.model_executor.model_loader.bitsandbytes_loader")
    except ModuleNotFoundError:
        loader = None
    return loader is not None


def start_engine(
    settings: ModelConfig,
    *,
    rank: int | None,
    max_sequence_tokens: int,
    gpu_memory_share: float,
    seed: int,
    flag: str,
    model: Any = None,
    max_batch_size: int | None = None,
    sleeps: bool = False,
) -> VllmEngine:
    """Load a base model into vLLM, with room for one adapter.

    If vLLM cannot hold a 4-bit base (on a CPU), it gets a copy of the unpacked weights.

    Args:
        settings: the base model and its bits.
        rank: rank to reserve memory for (`served_rank`); None serves no adapter.
        max_sequence_tokens: longest prompt and completion together.
        gpu_memory_share: share of the GPU's memory for weights and cache, 0 to 1.
        seed: of vLLM's global random numbers; completions have their own seeds.
        flag: the flag that chooses between vLLM and transformers, for messages.
        model: the base model if it is already in memory, to be unpacked from there.
        max_batch_size: completions decoded together; None takes vLLM's default.
        sleeps: allow `VllmEngine.sleep` to release memory, on a GPU.

    Raises:
        UserError: vLLM is not installed.
        RunError: the engine does not start.
    """
    base_model.wait_without_spinning()
    import torch

    on_cpu = not torch.cuda.is_available()
    sleeps = sleeps and not on_cpu
    options: dict[str, Any] = {
        "gpu_memory_utilization": gpu_memory_share,
        "enable_sleep_mode": sleeps,
        # vLLM profiles this batch at startup and subtracts its memory from the cache; its default is 8192 or more.
        "max_num_batched_tokens": max(_GPU_BATCH_TOKENS, max_sequence_tokens),
    }
    if on_cpu:
        options = {**_CPU_ENGINE, "max_num_batched_tokens": max(_CPU_BATCH_TOKENS, max_sequence_tokens)}
    if max_batch_size:
        options["max_num_seqs"] = min(max_batch_size, options.get("max_num_seqs", max_batch_size))
    if distributed.world_size() > 1:
        # One engine per process, in the process group that they have joined.
        options["distributed_executor_backend"] = "external_launcher"
    if rank:
        options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    for key, value in ((_CPU_SETTINGS if on_cpu else {}) | _SETTINGS).items():
        os.environ.setdefault(key, value)
    name, revision = base_model.source(settings.name), settings.revision
    with tempfile.TemporaryDirectory(prefix="lora_grpo-unpacked-") as folder:

        def unpack() -> str:
            base = base_model.load_base(settings) if model is None else model
            plain_copy(base).to(base_model.compute_dtype()).save_pretrained(folder)
            return folder

        if settings.bits == 4 and not on_cpu and can_quantize():
            options["quantization"] = "bitsandbytes"
        elif settings.bits == 4:
            # One copy for all processes; transformers (5.17) writes on the main one only.
            name, revision = distributed.broadcast_from_main(unpack), None
        with _quiet_start():
            vllm = require("vllm.entrypoints.llm", extra="gpu", feature=f"{flag} vllm")
            try:
                llm = vllm.LLM(
                    name,
                    revision=revision,
                    trust_remote_code=settings.trust_remote_code,
                    dtype=str(base_model.compute_dtype()).removeprefix("torch."),
                    max_model_len=max_sequence_tokens,
                    enable_prefix_caching=True,
                    # Of the distribution that is sampled from: after temperature and top-p.
                    logprobs_mode="processed_logprobs",
                    # Requests hold token ids and stop tokens: vLLM needs neither the tokenizer nor the model's own
                    # sampling defaults.
                    skip_tokenizer_init=True,
                    generation_config="vllm",
                    seed=seed,
                    use_tqdm_on_load=False,
                    **options,
                )
            except (OSError, ValueError, RuntimeError) as error:
                raise RunError(
                    f"vLLM cannot serve {settings.name}: {reason(error)}; use {flag} transformers"
                ) from error
        distributed.barrier()  # all processes have read the copy
    return VllmEngine(llm.llm_engine, max_sequence_tokens, flag, sleeps=sleeps)


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Let vLLM start quietly, and restore what it changes in this process."""
    import torch

    # vLLM creates a process group of one, which transformers warns about as a misconfigured launch.
    logging.getLogger("transformers.training_args").addFilter(lambda record: "parallel_mode" not in record.getMessage())
    environment = {name: os.environ.get(name) for name in _WORKER_VARIABLES}
    set_num_threads, disabled = torch.set_num_threads, logging.root.manager.disable
    # This hides other packages' warnings too; they are about parts that are not used here.
    logging.disable(max(disabled, logging.WARNING))
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)  # progress bars and C++ output
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            output.seek(0)
            os.write(terminal, output.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            logging.disable(disabled)
            torch.set_num_threads = set_num_threads
            for name, value in environment.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
