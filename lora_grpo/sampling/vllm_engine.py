"""A vLLM engine in this process: the frozen base model, and one adapter that requests may use."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.models import base_model
from lora_grpo.optional import require
from lora_grpo.sampling.merged_copy import plain_copy
from lora_grpo.sampling.sampler import SamplingParams

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


class VllmEngine:
    """A base model in vLLM, with room for one adapter. Nothing is ever merged.

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
        sleeps: allow `sleep` to release memory, on a GPU.

    Raises:
        UserError: vLLM is not installed.
        RunError: the engine does not start.
    """

    def __init__(
        self,
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
    ) -> None:
        base_model.wait_without_spinning()
        import torch

        self.max_sequence_tokens, self.flag = max_sequence_tokens, flag
        self._calls, self._adapters = itertools.count(), itertools.count(1)
        self._served: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        on_cpu = not torch.cuda.is_available()
        self._sleeps = sleeps and not on_cpu
        options: dict[str, Any] = {
            "gpu_memory_utilization": gpu_memory_share,
            "enable_sleep_mode": self._sleeps,
            # vLLM profiles this batch at startup and subtracts its memory from the cache; its default is 8192 or more.
            "max_num_batched_tokens": max(_GPU_BATCH_TOKENS, max_sequence_tokens),
        }
        if on_cpu:
            options = {**_CPU_ENGINE, "max_num_batched_tokens": max(_CPU_BATCH_TOKENS, max_sequence_tokens)}
        if max_batch_size:
            options["max_num_seqs"] = min(max_batch_size, options.get("max_num_seqs", max_batch_size))
        for key, value in ((_CPU_SETTINGS if on_cpu else {}) | _SETTINGS).items():
            os.environ.setdefault(key, value)
        name, revision = base_model.source(settings.name), settings.revision
        if settings.bits == 4 and not on_cpu and can_quantize():
            options["quantization"] = "bitsandbytes"
        elif settings.bits == 4:
            # One copy for all processes; transformers (5.17) writes on the main one only.
            name = distributed.broadcast_from_main(
                lambda: self._unpack(base_model.load_base(settings) if model is None else model)
            )
            revision = None
        if distributed.world_size() > 1:
            # One engine per process, in the process group that they have joined.
            options["distributed_executor_backend"] = "external_launcher"
        if rank:
            options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        with _quiet_start():
            vllm = require("vllm.entrypoints.llm", extra="gpu", feature=f"{flag} vllm")
            try:
                self._engine = vllm.LLM(
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
                ).llm_engine
            except (OSError, ValueError, RuntimeError) as error:
                self.close()
                raise RunError(
                    f"vLLM cannot serve {settings.name}: {_reason(error)}; use {flag} transformers"
                ) from error
        distributed.barrier()  # all processes read the one copy
        self._delete_unpacked()

    def _delete_unpacked(self) -> None:
        """Delete the unpacked weights, which the engine has loaded."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _unpack(self, model: Any) -> str:
        """Write the base's weights to a folder in the compute dtype, and return the folder."""
        self._folder = tempfile.TemporaryDirectory(prefix="lora_grpo-unpacked-")
        plain_copy(model).to(base_model.compute_dtype()).save_pretrained(self._folder.name)
        return self._folder.name

    def load_adapter(self, adapter: Path) -> Any:
        """Load an adapter in place of the previous one, and return its LoRARequest.

        Each gets its own number and name, because vLLM caches prompts by adapter name.

        Args:
            adapter: folder of a PEFT adapter, read before this returns.

        Raises:
            UserError: vLLM cannot serve it.
        """
        from vllm.lora.request import LoRARequest

        number = next(self._adapters)
        request = LoRARequest(f"adapter-{number}", number, str(adapter.resolve()))
        try:
            self._engine.add_lora(request)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise UserError(
                f"vLLM cannot serve the adapter in {adapter}: {_reason(error)}; use {self.flag} transformers"
            ) from error
        if self._served is not None:
            self._engine.remove_lora(self._served.lora_int_id)
        self._served = request
        return request

    def stream(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        eos_token_ids: list[int],
        request: Any,
        *,
        logprobs: bool,
    ) -> Iterator[tuple[int, list[int], list[float] | None]]:
        """Yield (index, token ids, their logprobs) of each completion as it ends.

        The engine gets all requests at once. Closing the generator early aborts those that have not ended.

        Args:
            prompts: R lists of token ids, one for each completion.
            params: how to sample.
            seeds: R, one for each completion.
            eos_token_ids: the tokens that end a completion.
            request: what `load_adapter` returned, or None for the base model.
            logprobs: False yields None in their place.

        Raises:
            RunError: the engine aborted a completion.
        """
        import vllm
        from vllm.sampling_params import RequestOutputKind

        if self._engine.has_unfinished_requests():
            raise RuntimeError("another stream of this sampler is running; finish or close it first")
        call = next(self._calls)
        pending = {f"{call}-{index}": index for index in range(len(prompts))}
        try:
            for name, index in pending.items():
                options = vllm.SamplingParams(
                    max_tokens=params.max_tokens,
                    temperature=params.temperature,
                    top_p=params.top_p,
                    seed=seeds[index] % 2**63,
                    stop_token_ids=eos_token_ids,
                    detokenize=False,
                    logprobs=0 if logprobs else None,  # only of the sampled token
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                self._engine.add_request(name, {"prompt_token_ids": prompts[index]}, options, lora_request=request)
            while pending:
                if not self._engine.has_unfinished_requests():
                    raise RunError(
                        f"vLLM lost {len(pending)} of {len(prompts)} completions; use {self.flag} transformers"
                    )
                for output in self._engine.step():
                    [completion] = output.outputs
                    if completion.finish_reason not in ("stop", "length"):
                        raise RunError(
                            f"vLLM aborted a completion ({completion.finish_reason}); use {self.flag} transformers"
                        )
                    each = token_logprobs(completion) if logprobs else None
                    yield pending.pop(output.request_id), list(completion.token_ids), each
        finally:
            if pending:
                self._engine.abort_request(list(pending))

    def prompt_logprobs(self, ids: list[int], request: Any) -> list[float]:
        """Return the logprobs of a prompt's tokens after the first, and of the most likely next token.

        Args:
            ids: the prompt's token ids.
            request: what `load_adapter` returned, or None for the base model.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=0, detokenize=False)
        name = f"check-{next(self._calls)}"
        self._engine.add_request(name, {"prompt_token_ids": ids}, params, lora_request=request)
        while True:
            for output in self._engine.step():
                first = dict(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True))
                tokens = [*zip(ids[1:], output.prompt_logprobs[1:], strict=True), *first.items()]
                return [candidates[token].logprob for token, candidates in tokens]

    def sleep(self) -> None:
        """Move the weights to host memory and free the cache, if the engine was created with `sleeps`."""
        if self._sleeps and not self._engine.is_sleeping():
            self._engine.sleep(level=1)

    def wake_up(self) -> None:
        """Take back what `sleep` released."""
        if self._sleeps and self._engine.is_sleeping():
            import torch

            gc.collect()
            torch.cuda.empty_cache()  # vLLM does not allocate through torch
            self._engine.wake_up()

    def close(self) -> None:
        """Shut the engine down and free its memory, so that another model can be loaded."""
        engine = self.__dict__.pop("_engine", None)
        if engine is not None:
            engine.engine_core.shutdown()
        del engine
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._delete_unpacked()


def token_logprobs(completion: Any) -> list[float]:
    """Return the logprob of each token of a completion that was requested with `logprobs=0`."""
    tokens = zip(completion.token_ids, completion.logprobs, strict=True)
    return [candidates[token].logprob for token, candidates in tokens]


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


def _reason(error: Exception) -> str:
    """Return the cause in one sentence; pydantic's errors have it on their second line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    cause = next((line.removeprefix("Value error, ") for line in lines if line.startswith("Value error, ")), None)
    return (cause or first_line(error)).split(" [type=")[0].split(". ")[0].rstrip(".")
