"""A vLLM engine in this process: starts it with a base model, replaces its adapter, and decodes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError
from lora_grpo.hardware import check_vllm_quantizes, use_tables
from lora_grpo.models import base_model, engines, in_vllm, model_files
from lora_grpo.progress import waiting
from lora_grpo.sampling.merged_copy import plain_copy
from lora_grpo.sampling.requests import Request, RequestQueue, Waiting
from lora_grpo.sampling.samples import Decoded, SampledTokens

_SETTINGS = {
    # The engine runs in this process, so that it ends with it. On a CPU, it then uses torch's threads, unpinned.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # otherwise vLLM connects to the internet to find it
    "VLLM_WSL2_ENABLE_PIN_MEMORY": "1",  # otherwise vLLM fails on WSL2: "UVA is not available"
    # The plan has CUDA graphs on top of vLLM's memory; vLLM 0.29 and newer would take them out of it.
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0",
}
_CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Otherwise the first logprobs wait for a C++ compiler for up to half a minute.
    "TORCHDYNAMO_DISABLE": "1",
}
_CPU_BATCH_SIZE = 128
"""Maximum number of completions that are decoded together on a CPU."""
_GPU_MEMORY_FRACTION = 0.85
"""Fraction of the free memory for weights and cache, without `model.gpu_memory_share`."""


class VllmEngine:
    """A base model in vLLM's `LLMEngine`, with space for one adapter, which is never merged."""

    def __init__(self, engine: Any, *, sleeps: bool) -> None:
        self._engine = engine
        self._sleeps = sleeps
        self._call_numbers = itertools.count()
        self._adapter_numbers = itertools.count(1)
        self._loaded_adapter: Any = None

    @property
    def adapter_dtype(self) -> Any:
        """The dtype in which vLLM keeps adapters: the base's, which is 16 bits on a GPU."""
        return self._engine.vllm_config.lora_config.lora_dtype

    def load_adapter(self, adapter: Path) -> Any:
        """Replace the adapter and return its LoRARequest, or raise a UserError if vLLM cannot serve it."""
        from vllm.lora.request import LoRARequest

        number = next(self._adapter_numbers)  # a new name each time, because vLLM caches prompts by adapter name
        request = LoRARequest(f"adapter-{number}", number, str(adapter.resolve()))
        try:
            self._engine.add_lora(request)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            problem = f"vLLM cannot serve the adapter in {adapter}: {engines.reason(error)}"
            raise UserError(f"{problem}; select the transformers backend") from error
        if self._loaded_adapter is not None:
            self._engine.remove_lora(self._loaded_adapter.lora_int_id)
        self._loaded_adapter = request
        return request

    def stream(
        self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]], adapter: Any
    ) -> Iterator[tuple[int, Decoded]]:
        """Yield (index, tokens with logprobs) of each completion when it is finished.

        If the generator is closed early, unfinished requests are aborted. Only one generator may run at a time.

        Args:
            prompts: R lists of token ids, one per completion.
            options: R sets of arguments for vLLM's `SamplingParams`.
            adapter: None for the base model.
        """
        if self._engine.has_unfinished_requests():
            raise RuntimeError("another stream of this sampler is running; finish or close it first")
        call = next(self._call_numbers)
        pending = {f"{call}-{index}": index for index in range(len(prompts))}
        try:
            for name, index in pending.items():
                self._add(name, prompts[index], options[index], adapter)
            while pending:
                for name, decoded in self._step():
                    yield pending.pop(name), decoded
        finally:
            if pending:
                self._engine.abort_request(list(pending))

    def serve(
        self,
        queue: RequestQueue,
        task_of: Callable[[Request], tuple[dict[str, Any], Any]],
        sample_of: Callable[[Request, Decoded], SampledTokens],
    ) -> None:
        """Decode requests as they come, until the queue is closed and empty. Canceled ones are aborted.

        Args:
            task_of: returns the arguments for vLLM's `SamplingParams`, and the adapter or None.
            sample_of: returns the completion that a request gets.
        """
        call = next(self._call_numbers)
        request_numbers = itertools.count()
        running: dict[str, Waiting] = {}
        try:
            while True:
                # If nothing is running, there is nothing to do until a request arrives.
                arrived = queue.take_arrived(wait=not running)
                if arrived is None:
                    return
                for waiting in arrived:
                    name = f"{call}-{next(request_numbers)}"
                    options, adapter = task_of(waiting.request)
                    self._add(name, waiting.request.prompt_ids, options, adapter)
                    running[name] = waiting

                canceled = [name for name, waiting in running.items() if waiting.future.cancelled()]
                if canceled:
                    self._engine.abort_request(canceled)
                    for name in canceled:
                        del running[name]

                if running:
                    for name, decoded in self._step():
                        waiting = running.pop(name)
                        waiting.finish(sample_of(waiting.request, decoded))
        finally:
            if running:
                self._engine.abort_request(list(running))

    def _add(self, name: str, prompt: list[int], options: dict[str, Any], adapter: Any) -> None:
        """Add a request to those that the engine decodes."""
        import vllm
        from vllm.sampling_params import RequestOutputKind

        [engine_input] = self._engine.renderer.render_cmpl([{"prompt_token_ids": prompt}])
        params = vllm.SamplingParams(**options, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        self._engine.add_request(name, engine_input, params, lora_request=adapter)

    def _step(self) -> list[tuple[str, Decoded]]:
        """Decode one more token of each request, and return the name and the tokens of those that have finished."""
        finished = []
        for output in self._engine.step():
            [completion] = output.outputs
            reason = completion.finish_reason
            if reason not in ("stop", "length"):
                raise RunError(f"vLLM aborted a completion ({reason}); select the transformers backend")
            decoded = Decoded(list(completion.token_ids), _token_logprobs(completion))
            finished.append((output.request_id, decoded))
        return finished

    def sleep(self) -> None:
        """Move the weights to host memory and free the cache."""
        if self._sleeps and not self._engine.is_sleeping():
            self._engine.sleep(level=1)

    def wake_up(self) -> None:
        """Restore what `sleep` released."""
        if self._sleeps and self._engine.is_sleeping():
            import torch

            gc.collect()
            torch.cuda.empty_cache()  # vLLM allocates its memory itself, and cannot use what torch only caches
            self._engine.wake_up()

    def close(self) -> None:
        """Shut down the engine and free its memory."""
        import torch

        self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()
        torch.cuda.empty_cache()


def _token_logprobs(completion: Any) -> list[float] | None:
    """Return the logprob of each token, or None if they were not requested."""
    if completion.logprobs is None:
        return None
    logprobs = []
    for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        logprobs.append(candidates[token].logprob)
    return logprobs


def start_engine(
    settings: ModelConfig,
    *,
    rank: int | None,
    max_sequence_tokens: int,
    seed: int,
    max_batch_size: int | None = None,
    sleeps: bool = False,
    reproducible: bool = False,
) -> VllmEngine:
    """Load a base model into vLLM, with space for one adapter. On a CPU, a 4-bit base is dequantized.

    Without `settings.gpu_memory_share`, weights and cache use most of the free memory.

    Args:
        rank: rank to reserve memory for (see `served_rank`). None disables adapters.
        seed: of vLLM's global random generators. Completions have their own seeds.
        max_batch_size: completions decoded together. None uses vLLM's default.
        sleeps: on a GPU, allow `VllmEngine.sleep` to release memory.
        reproducible: on a GPU, add in a fixed order in the kernels of adapters; see `use_tables`.
    """
    import torch

    on_cpu = not torch.cuda.is_available()
    family = model_files.read_config(settings).get("model_type")
    if not in_vllm(family) or (family == "lfm2" and on_cpu):
        problem = f"this version of vLLM does not compute the logits of a model of type {family}"
        raise UserError(f"{problem} (docs/models.md); select the transformers backend")
    sleeps = sleeps and not on_cpu
    if on_cpu:
        max_batch_size = min(max_batch_size or _CPU_BATCH_SIZE, _CPU_BATCH_SIZE)
        options = _cpu_options(max_sequence_tokens)
    else:
        engines.require_compiler(feature="the vllm backend", otherwise="select the transformers backend")
        options = _gpu_options(settings, max_sequence_tokens, sleeps=sleeps)
        use_tables(torch.cuda.get_device_name(), reproducible=reproducible)
    if max_batch_size:
        options["max_num_seqs"] = max_batch_size
    if distributed.world_size() > 1:  # one engine per process, in the existing process group
        options["distributed_executor_backend"] = "external_launcher"
    if rank:
        options["enable_lora"] = True
        options["max_lora_rank"] = rank
        options["max_loras"] = 1

    # vLLM creates a process group with one process, which transformers reports as a misconfigured launch.
    logging.getLogger("transformers.training_args").addFilter(lambda record: "parallel_mode" not in record.msg)
    engines.hide_flashinfer()
    variables = _SETTINGS | _CPU_SETTINGS if on_cpu else _SETTINGS
    for name, value in variables.items():
        os.environ.setdefault(name, value)

    with contextlib.ExitStack() as while_starting:
        source = model_files.source(settings.name)
        revision = settings.revision
        if on_cpu and settings.loaded_bits == 4:
            source = while_starting.enter_context(_dequantized(settings))
            revision = None
        while_starting.enter_context(_restoring_globals())
        while_starting.enter_context(waiting(f"vLLM starts with {settings.name}"))
        from vllm.entrypoints import llm

        model = llm.LLM(
            source,
            revision=revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=str(base_model.compute_dtype()).removeprefix("torch."),
            max_model_len=max_sequence_tokens,
            # In a model with recurrent layers, this needs chunked prefill, which is off on a CPU.
            enable_prefix_caching=not (on_cpu and family == "granitemoehybrid"),
            language_model_only=True,  # not the part that reads images
            # Logprobs of the sampled distribution, after temperature and top-p.
            logprobs_mode="processed_logprobs",
            # Requests contain token ids and stop tokens, so vLLM needs neither the tokenizer nor the model's sampling
            # defaults.
            skip_tokenizer_init=True,
            generation_config="vllm",
            seed=seed,
            use_tqdm_on_load=False,
            **options,
        )
    return VllmEngine(model.llm_engine, sleeps=sleeps)


def _cpu_options(max_sequence_tokens: int) -> dict[str, Any]:
    return {
        "enforce_eager": True,
        # Each prompt chunk samples and discards a token, and random generators on a CPU cannot be rewound.
        "enable_chunked_prefill": False,
        # Samples share only the full blocks of their prompt, and few prompts fill the default of 128 tokens.
        "block_size": 32,
        "max_num_batched_tokens": max(512, max_sequence_tokens),  # the adapter is copied for each token
    }


def _gpu_options(settings: ModelConfig, max_sequence_tokens: int, *, sleeps: bool) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info()
    options: dict[str, Any] = {
        "gpu_memory_utilization": settings.gpu_memory_share or _GPU_MEMORY_FRACTION * free / total,
        "enable_sleep_mode": sleeps,
        # A few prompts saturate a GPU, and vLLM subtracts this batch from the cache (its default is 8192 or more).
        "max_num_batched_tokens": max(4096, max_sequence_tokens),
    }
    if settings.loaded_bits == 4:
        check_vllm_quantizes()
        options["quantization"] = "bitsandbytes"
    return options


@contextlib.contextmanager
def _dequantized(settings: ModelConfig) -> Iterator[str]:
    """Write an unquantized copy of a 4-bit base to a folder that exists inside the block."""
    with tempfile.TemporaryDirectory(prefix="lora_grpo-unpacked-") as folder:
        plain_copy(base_model.load_base(settings)).save_pretrained(folder)
        yield folder


@contextlib.contextmanager
def _restoring_globals() -> Iterator[None]:
    """Undo what vLLM changes in this process while it starts.

    It replaces a function of torch, and sets variables for worker processes that the grader's programs would inherit.
    """
    import torch

    set_num_threads = torch.set_num_threads
    variables = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS")}
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
