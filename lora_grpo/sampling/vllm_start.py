"""Start a vLLM engine in this process."""

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
    # Otherwise the first logprobs wait for a C++ compiler for up to half a minute.
    "TORCHDYNAMO_DISABLE": "1",
}
_SETTINGS = {
    # Run the engine in this process, so that they end together. On a CPU it then uses torch's unpinned threads.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # otherwise vLLM connects to the internet to find it
}
_CPU_ENGINE = {
    "enforce_eager": True,
    # Each prompt chunk samples and discards a token, and random generators on a CPU cannot be rewound.
    "enable_chunked_prefill": False,
    # Samples share only the full blocks of their prompt, and few prompts fill the default block of 128 tokens.
    "block_size": 32,
    "max_num_seqs": 128,
}
_CPU_BATCH_TOKENS = 512
"""Tokens per prefill batch. vLLM copies the adapter's matrices for each token."""
_GPU_BATCH_TOKENS = 4096
"""Tokens per prefill batch on a GPU. A few prompts are enough to saturate it."""
_WORKER_VARIABLES = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS")
"""Environment variables that vLLM sets for worker processes. Programs run by the grader would inherit them."""


def can_quantize() -> bool:
    """Return whether this vLLM version can serve NF4 on a GPU. Version 0.28 moved this to a separate package."""
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
    """Load a base model into vLLM, with memory for one adapter.

    If vLLM does not support a 4-bit base (on a CPU, for example), it loads a dequantized copy.

    Args:
        settings: the base model and its precision.
        rank: rank to reserve memory for (see `served_rank`). None disables adapters.
        max_sequence_tokens: maximum length of a prompt and its completion, in tokens.
        gpu_memory_share: share of GPU memory for weights and cache, 0 to 1.
        seed: seed of vLLM's global random generators. Completions have their own seeds.
        flag: the flag that selects vLLM or transformers, for error messages.
        model: the base model if it is already in memory, to copy it from there.
        max_batch_size: maximum number of completions decoded together. None uses vLLM's default.
        sleeps: on a GPU, allow `VllmEngine.sleep` to release memory.

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
        # vLLM profiles this batch at startup and subtracts its memory from the cache. The default is 8192 or more.
        "max_num_batched_tokens": max(_GPU_BATCH_TOKENS, max_sequence_tokens),
    }
    if on_cpu:
        options = {**_CPU_ENGINE, "max_num_batched_tokens": max(_CPU_BATCH_TOKENS, max_sequence_tokens)}
    if max_batch_size:
        options["max_num_seqs"] = min(max_batch_size, options.get("max_num_seqs", max_batch_size))
    if distributed.world_size() > 1:
        # One engine per process, in the existing process group.
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
            # One copy for all processes, because transformers (5.17) only writes on the main process.
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
                    # Logprobs of the sampled distribution, after temperature and top-p.
                    logprobs_mode="processed_logprobs",
                    # Requests contain token ids and stop tokens, so vLLM needs neither the tokenizer nor the model's
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
    """Silence vLLM while it starts, and restore the settings that it changes in this process."""
    import torch

    # vLLM creates a process group with one process, which transformers reports as a misconfigured launch.
    logging.getLogger("transformers.training_args").addFilter(lambda record: "parallel_mode" not in record.getMessage())
    environment = {name: os.environ.get(name) for name in _WORKER_VARIABLES}
    set_num_threads, disabled = torch.set_num_threads, logging.root.manager.disable
    # This also hides warnings of other packages, which are about parts that are not used here.
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
