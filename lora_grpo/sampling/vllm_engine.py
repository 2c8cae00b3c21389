"""A vLLM engine in this process, with the frozen base model and at most one adapter."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.models import base_model, engines, model_files
from lora_grpo.sampling.merged_copy import plain_copy
from lora_grpo.sampling.sampler import Decoded

_SETTINGS = {
    # Run the engine in this process, so that they end together. On a CPU it then uses torch's unpinned threads.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # otherwise vLLM connects to the internet to find it
    "VLLM_WSL2_ENABLE_PIN_MEMORY": "1",  # otherwise vLLM 0.27 fails on WSL2: "UVA is not available"
}
_CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Otherwise the first logprobs wait for a C++ compiler for up to half a minute.
    "TORCHDYNAMO_DISABLE": "1",
}
_CPU_ENGINE = {
    "enforce_eager": True,
    # Each prompt chunk samples and discards a token, and random generators on a CPU cannot be rewound.
    "enable_chunked_prefill": False,
    # Samples share only the full blocks of their prompt, and few prompts fill the default block of 128 tokens.
    "block_size": 32,
}
_CPU_BATCH_SIZE = 128
_CPU_BATCH_TOKENS, _GPU_BATCH_TOKENS = 512, 4096
"""Tokens per prefill batch. On a CPU, vLLM copies the adapter's matrices for each token. On a GPU, a few prompts are
enough to saturate it, and vLLM subtracts the memory of this batch from the cache (its default is 8192 or more)."""
_FREE_SHARE = 0.85
"""Share of the free GPU memory that an engine uses by default. vLLM does not start if it requests more than is free."""
_WORKER_VARIABLES = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS")
"""Environment variables that vLLM sets for worker processes. Programs run by the grader would inherit them."""


class VllmEngine:
    """A base model in vLLM's `LLMEngine`, with room for one adapter, which is never merged."""

    def __init__(self, engine: Any, *, sleeps: bool) -> None:
        self._engine, self._sleeps = engine, sleeps
        self._calls, self._adapters = itertools.count(), itertools.count(1)
        self._served: Any = None

    def load_adapter(self, adapter: Path) -> Any:
        """Replace the adapter and return its LoRARequest, or raise a UserError if vLLM cannot serve it."""
        from vllm.lora.request import LoRARequest

        number = next(self._adapters)  # vLLM caches prompts by adapter name
        request = LoRARequest(f"adapter-{number}", number, str(adapter.resolve()))
        try:
            self._engine.add_lora(request)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise UserError(
                f"vLLM cannot serve the adapter in {adapter}: {_reason(error)}; select the transformers backend"
            ) from error
        if self._served is not None:
            self._engine.remove_lora(self._served.lora_int_id)
        self._served = request
        return request

    def stream(
        self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]], adapter: Any
    ) -> Iterator[tuple[int, Decoded]]:
        """Yield (index, (token ids, logprobs)) of each completion when it is finished.

        If the generator is closed early, unfinished requests are aborted. Only one generator may run at a time.

        Args:
            prompts: R lists of token ids, one per completion.
            options: R sets of arguments for vLLM's `SamplingParams`.
            adapter: None for the base model.
        """
        import vllm
        from vllm.sampling_params import RequestOutputKind

        if self._engine.has_unfinished_requests():
            raise RuntimeError("another stream of this sampler is running; finish or close it first")
        call = next(self._calls)
        pending = {f"{call}-{index}": index for index in range(len(prompts))}
        try:
            for name, index in pending.items():
                params = vllm.SamplingParams(
                    **options[index], detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
                )
                self._engine.add_request(name, {"prompt_token_ids": prompts[index]}, params, lora_request=adapter)
            while pending:
                for output in self._engine.step():
                    [completion] = output.outputs
                    if completion.finish_reason not in ("stop", "length"):
                        raise RunError(
                            f"vLLM aborted a completion ({completion.finish_reason}); select the transformers backend"
                        )
                    yield pending.pop(output.request_id), (list(completion.token_ids), token_logprobs(completion))
        finally:
            if pending:
                self._engine.abort_request(list(pending))

    def sleep(self) -> None:
        """Move the weights to host memory and free the cache."""
        if self._sleeps and not self._engine.is_sleeping():
            self._engine.sleep(level=1)

    def wake_up(self) -> None:
        """Restore what `sleep` released."""
        if self._sleeps and self._engine.is_sleeping():
            import torch

            gc.collect()
            torch.cuda.empty_cache()  # vLLM does not allocate this memory through torch
            self._engine.wake_up()

    def close(self) -> None:
        """Shut down the engine and free its memory."""
        import torch

        self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()
        torch.cuda.empty_cache()


def token_logprobs(completion: Any) -> list[float] | None:
    """Return the logprob of each token, or None if they were not requested."""
    if completion.logprobs is None:
        return None
    tokens = zip(completion.token_ids, completion.logprobs, strict=True)
    return [candidates[token].logprob for token, candidates in tokens]


def start_engine(
    settings: ModelConfig,
    *,
    rank: int | None,
    max_sequence_tokens: int,
    seed: int,
    gpu_memory_share: float | None = None,
    max_batch_size: int | None = None,
    sleeps: bool = False,
) -> VllmEngine:
    """Load a base model into vLLM, with room for one adapter. On a CPU, a 4-bit base is dequantized.

    Args:
        rank: rank to reserve memory for (see `served_rank`). None disables adapters.
        seed: of vLLM's global random generators. Completions have their own seeds.
        gpu_memory_share: share of the GPU's total memory for weights and cache, 0 to 1. None uses most of the free
            memory.
        max_batch_size: completions decoded together. None uses vLLM's default.
        sleeps: on a GPU, allow `VllmEngine.sleep` to release memory.

    Raises:
        RunError: the engine does not start.
    """
    import torch

    on_cpu = not torch.cuda.is_available()
    sleeps = sleeps and not on_cpu
    options: dict[str, Any]
    if on_cpu:
        options = {**_CPU_ENGINE, "max_num_batched_tokens": max(_CPU_BATCH_TOKENS, max_sequence_tokens)}
        max_batch_size = min(max_batch_size or _CPU_BATCH_SIZE, _CPU_BATCH_SIZE)
    else:
        free, total = torch.cuda.mem_get_info()
        options = {
            "gpu_memory_utilization": gpu_memory_share or _FREE_SHARE * free / total,
            "enable_sleep_mode": sleeps,
            "max_num_batched_tokens": max(_GPU_BATCH_TOKENS, max_sequence_tokens),
        }
        if settings.bits == 4:
            options["quantization"] = "bitsandbytes"
    if max_batch_size:
        options["max_num_seqs"] = max_batch_size
    if distributed.world_size() > 1:
        # One engine per process, in the existing process group.
        options["distributed_executor_backend"] = "external_launcher"
    if rank:
        options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    for key, value in ((_CPU_SETTINGS if on_cpu else {}) | _SETTINGS).items():
        os.environ.setdefault(key, value)
    name, revision = model_files.source(settings.name), settings.revision
    with tempfile.TemporaryDirectory(prefix="lora_grpo-unpacked-") as folder:

        def unpack() -> str:
            plain_copy(base_model.load_base(settings)).save_pretrained(folder)
            return folder

        if settings.bits == 4 and on_cpu:
            # One copy for all processes, because transformers (5.17) only writes on the main process.
            name, revision = distributed.broadcast_from_main(unpack), None
        # vLLM creates a process group with one process, which transformers reports as a misconfigured launch.
        logging.getLogger("transformers.training_args").addFilter(lambda record: "parallel_mode" not in record.msg)
        with _process_restored():
            vllm = engines.require(
                "vllm.entrypoints.llm",
                extra="gpu",
                feature="the vllm backend",
                otherwise="select the transformers backend",
            )
            if not on_cpu:
                engines.require_compiler(feature="the vllm backend", otherwise="select the transformers backend")
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
            except (Exception, SystemExit) as error:
                raise RunError(
                    f"vLLM cannot serve {settings.name}: {_reason(error)}; select the transformers backend"
                ) from error
        distributed.barrier()  # all processes have read the copy
    return VllmEngine(llm.llm_engine, sleeps=sleeps)


@contextlib.contextmanager
def _process_restored() -> Iterator[None]:
    """Restore the settings of this process that vLLM changes when it starts."""
    import torch

    environment = {name: os.environ.get(name) for name in _WORKER_VARIABLES}
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _reason(error: BaseException) -> str:
    """Return the cause of an error. pydantic's errors name it on a later line."""
    cause = str(error).rpartition("Value error, ")
    return cause[2].partition(" [type=")[0] if cause[1] else engines.reason(error)
