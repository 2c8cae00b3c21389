"""Sample with vLLM: a sampler for an engine or a server, and an engine in this process.

The frozen base model is loaded once, and only its adapter is replaced, which is never merged.
"""

from __future__ import annotations

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
from lora_grpo.memory import estimate
from lora_grpo.models import ADAPTER_WEIGHTS, NOT_IN_VLLM, SELECTION, base_model, engines, model_files, read_adapter
from lora_grpo.sampling.merged_copy import plain_copy
from lora_grpo.sampling.sampler import Decoded, Prompts, SampledTokens, Sampler, SamplingParams, by_prompt
from lora_grpo.sampling.vllm_server import VllmServer

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


class VllmSampler(Sampler):
    """Samples with a vLLM engine or server.

    TRL's own vLLM mode merges the adapter into the base and unmerges it at every step, which rounds a 4-bit base each
    time. This class never changes the base. The random numbers of a completion depend only on its seed. Its logits may
    differ by rounding, depending on the rest of the batch.

    In training, the adapter of the PEFT model `policy` is loaded at each `wake_up`. In evaluation, the saved `adapter`
    is loaded once.
    """

    streams = True

    def __init__(
        self,
        engine: VllmEngine | VllmServer,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        *,
        policy: Any = None,
        adapter: Path | None = None,
    ) -> None:
        super().__init__(policy, tokenizer, eos_token_ids)
        self.engine = engine
        self.serves_training = policy is not None
        self._saved = self._load_saved(adapter) if adapter else None
        self._adapter: Any = None

    def _load_saved(self, adapter: Path) -> Any:
        """Load an adapter, check that it changes the logits, and return its LoRARequest."""
        from safetensors.torch import load_file

        request = self.engine.load_adapter(adapter)
        weights = load_file(adapter / ADAPTER_WEIGHTS)
        is_new = not any(weight.any() for name, weight in weights.items() if "lora_B" in name or "embedding_B" in name)
        ids = self.encode(["How many plums does Tom have now?"])
        options = request_options(SamplingParams(1, 1.0, 1.0, max_tokens=8), [0], self.eos_token_ids, logprobs=True)
        base, adapted = ([*self.engine.stream(ids, options, each)] for each in (None, request))
        if adapted == base and not is_new:
            raise RunError(
                f"vLLM ignores the adapter in {adapter}: tokens and logprobs are the same with and without it; "
                "select the transformers backend"
            )
        return request

    def wake_up(self, *, adapter: bool) -> None:
        """Load the policy's current adapter, or select the saved adapter or the base model."""
        self.engine.wake_up()
        self._adapter = self._saved if adapter else None
        if adapter and self.model is not None:
            with tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-") as folder:
                # Otherwise PEFT queries the Hub to find out whether the vocabulary was resized.
                self.model.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False)
                # safetensors makes the file private, but a server may run as another user.
                Path(folder, ADAPTER_WEIGHTS).chmod(0o644)
                self._adapter = self.engine.load_adapter(Path(folder))

    def sleep(self) -> None:
        """Release GPU memory until the next `wake_up`."""
        self.engine.sleep()

    def stream(
        self, prompts: Prompts, params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Yield (index of the prompt, its completions) when all completions of a prompt are finished."""
        group = params.num_samples
        requests = [ids for ids in self.encode(prompts) for _ in range(group)]
        wants_logprobs = self.serves_training and params.temperature > 0  # none for greedy decoding
        options = request_options(params, seeds, self.eos_token_ids, logprobs=wants_logprobs)
        for index, decoded in by_prompt(self.engine.stream(requests, options, self._adapter), group):
            yield index, self._to_samples(decoded, params)

    def close(self) -> None:
        """Shut down the engine."""
        self.engine.close()


def request_options(
    params: SamplingParams, seeds: Sequence[int], eos_token_ids: list[int], *, logprobs: bool
) -> list[dict[str, Any]]:
    """Return the options of each completion, by their names in vLLM's Python and HTTP interfaces.

    They include everything that a server would otherwise read from the model's generation_config.json.
    """
    shared: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    shared |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": eos_token_ids}
    shared |= {"logprobs": 0 if logprobs else None}  # only for the sampled token
    return [{**shared, "seed": seed, "max_tokens": params.limit(index)} for index, seed in enumerate(seeds)]


def served_rank(adapter: Path) -> int:
    """Return `estimate.reserved_rank` for a saved adapter, or raise a UserError if vLLM cannot serve it."""
    saved = read_adapter(adapter)
    saved.check(SELECTION, "which vLLM does not serve; select the transformers backend")
    return estimate.reserved_rank(saved.r)


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
            problem = f"vLLM cannot serve the adapter in {adapter}: {engines.reason(error)}"
            raise UserError(f"{problem}; select the transformers backend") from error
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
                kind = RequestOutputKind.FINAL_ONLY
                params = vllm.SamplingParams(**options[index], detokenize=False, output_kind=kind)
                self._engine.add_request(name, {"prompt_token_ids": prompts[index]}, params, lora_request=adapter)
            while pending:
                for output in self._engine.step():
                    [completion] = output.outputs
                    if (reason := completion.finish_reason) not in ("stop", "length"):
                        raise RunError(f"vLLM aborted a completion ({reason}); select the transformers backend")
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
    max_batch_size: int | None = None,
    sleeps: bool = False,
) -> VllmEngine:
    """Load a base model into vLLM, with room for one adapter. On a CPU, a 4-bit base is dequantized.

    Without `settings.gpu_memory_share`, weights and cache use most of the free memory.

    Args:
        rank: rank to reserve memory for (see `served_rank`). None disables adapters.
        seed: of vLLM's global random generators. Completions have their own seeds.
        max_batch_size: completions decoded together. None uses vLLM's default.
        sleeps: on a GPU, allow `VllmEngine.sleep` to release memory.
    """
    import torch

    on_cpu = not torch.cuda.is_available()
    family = model_files.read_config(settings).get("model_type")
    if family in NOT_IN_VLLM or (family == "lfm2" and on_cpu):
        problem = f"vLLM 0.27 does not compute the logits of a model of type {family}"
        raise UserError(f"{problem} (docs/models.md); select the transformers backend")
    sleeps = sleeps and not on_cpu
    name, revision = model_files.source(settings.name), settings.revision
    options: dict[str, Any] = {}
    if on_cpu:
        options |= {
            "enforce_eager": True,
            # Each prompt chunk samples and discards a token, and random generators on a CPU cannot be rewound.
            "enable_chunked_prefill": False,
            # Samples share only the full blocks of their prompt, and few prompts fill the default of 128 tokens.
            "block_size": 32,
            "max_num_batched_tokens": max(512, max_sequence_tokens),  # the adapter is copied for each token
        }
        max_batch_size = min(max_batch_size or 128, 128)
        if settings.bits == 4:
            unpacked = tempfile.TemporaryDirectory(prefix="lora_grpo-unpacked-")  # until vLLM has read it
            plain_copy(base_model.load_base(settings)).save_pretrained(unpacked.name)
            name, revision = unpacked.name, None
    else:
        engines.require_compiler(feature="the vllm backend", otherwise="select the transformers backend")
        free, total = torch.cuda.mem_get_info()
        options |= {
            "gpu_memory_utilization": settings.gpu_memory_share or 0.85 * free / total,
            "enable_sleep_mode": sleeps,
            # A few prompts saturate a GPU, and vLLM subtracts this batch from the cache (its default is 8192 or more).
            "max_num_batched_tokens": max(4096, max_sequence_tokens),
        }
        if settings.bits == 4:
            options["quantization"] = "bitsandbytes"
    if max_batch_size:
        options["max_num_seqs"] = max_batch_size
    if distributed.world_size() > 1:  # one engine per process, in the existing process group
        options["distributed_executor_backend"] = "external_launcher"
    if rank:
        options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    for key, value in ((_CPU_SETTINGS if on_cpu else {}) | _SETTINGS).items():
        os.environ.setdefault(key, value)
    # vLLM creates a process group with one process, which transformers reports as a misconfigured launch.
    logging.getLogger("transformers.training_args").addFilter(lambda record: "parallel_mode" not in record.msg)
    engines.hide_flashinfer()
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    try:
        from vllm.entrypoints import llm

        model = llm.LLM(
            name,
            revision=revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=str(base_model.compute_dtype()).removeprefix("torch."),
            max_model_len=max_sequence_tokens,
            # With recurrent layers, it needs chunked prefill.
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
    finally:
        # vLLM replaces this function, and sets variables for worker processes that the grader's programs would inherit.
        torch.set_num_threads = set_num_threads
        for key in ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS"):
            os.environ.pop(key, None)
            os.environ.update({key: environment[key]} if key in environment else {})
    return VllmEngine(model.llm_engine, sleeps=sleeps)
