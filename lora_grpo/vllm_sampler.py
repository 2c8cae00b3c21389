"""Completions by vLLM, for evaluation: one engine for a base and its adapter, which is never merged."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_grpo import base_model
from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.merged_copy import plain_copy
from lora_grpo.optional import require
from lora_grpo.rollouts import Rollout, Sampler

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM (0.27) makes room for; an adapter takes the next one."""

_NOT_SERVED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save",
    "lora_bias": "lora_bias",
    "trainable_token_indices": "trainable tokens",
    "rank_pattern": "ranks of its own for some modules",
    "alpha_pattern": "scales of its own for some modules",
    "layer_replication": "replicated layers",
    "target_parameters": "target_parameters",
    "alora_invocation_tokens": "aLoRA",
    "arrow_config": "Arrow",
    "use_bdlora": "BD-LoRA",
    "use_qalora": "QALoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
"""Fields of adapter_config.json that change the model and that vLLM refuses or, worse, passes over in silence."""

_CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Otherwise the first log-probabilities wait for a C++ compiler, up to half a minute for one small kernel.
    "TORCHDYNAMO_DISABLE": "1",
}
_SETTINGS = {
    # The engine in this process: it ends with it; on a CPU its threads are torch's own then, bound to no core.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # of the one process; found out by a connection to the internet otherwise
}
_CPU_ENGINE = {
    "enforce_eager": True,
    # A part of a prompt that was read draws a token that is thrown away, and a CPU's random generator cannot step back.
    "enable_chunked_prefill": False,
    # A prompt's blocks are shared by its samples when they are full; the default, 128 tokens, few prompts fill.
    "block_size": 32,
    "max_num_seqs": 128,
}
_CPU_BATCH_TOKENS = 512
"""Read at once: the adapter's matrices are copied for each of them."""
_BYSTANDERS = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS")
"""Variables that vLLM sets for workers that it does not start here; programs that are graded would inherit them."""


def available() -> bool:
    """Tell whether vLLM is installed, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def served_rank(adapter: Path) -> int:
    """Return the rank that vLLM must make room for, from adapter_config.json alone.

    Args:
        adapter: a PEFT adapter's folder.

    Raises:
        UserError: vLLM cannot serve this adapter; says why.
    """
    path = adapter / "adapter_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, kind, bias = config["r"], config["peft_type"], config.get("bias", "none")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as a LoRA adapter's: {first_line(error)}") from None
    reasons = [words for name, words in _NOT_SERVED.items() if config.get(name)]
    if kind != "LORA":
        reasons.append(f"of type {kind}")
    if bias != "none":
        reasons.append(f"bias={bias}")
    if not isinstance(rank, int) or not 1 <= rank <= RANKS[-1]:
        reasons.append(f"rank {rank}")
    if reasons:
        raise UserError(
            f"vLLM cannot serve the adapter in {adapter} ({', '.join(reasons)}); use --backend transformers"
        )
    return min(served for served in RANKS if served >= rank)


class VllmSampler(Sampler):
    """Samples by a vLLM engine of its own.

    On a CPU, where vLLM has no bitsandbytes, a 4-bit base is served as a full-precision copy of its unpacked weights;
    the adapter lies beside it there too. A completion's draws depend on its seed; its logits, within rounding, also on
    what shares its batch.

    Args:
        settings: the base model, and its bits.
        tokenizer: what prompts and completions are read with.
        eos_token_ids: the tokens that end a completion.
        adapter: a PEFT adapter's folder; None serves the base alone.
        max_sequence_tokens: the most that a prompt and its completion take.
        gpu_memory_share: share of the GPU's memory for weights and cache, 0 to 1.
        seed: of vLLM's own random numbers; completions have their own seeds.

    Raises:
        UserError: vLLM is missing, or cannot serve this adapter.
        RunError: the engine does not start, or leaves the adapter out.
    """

    serves_training = False
    streams = True

    def __init__(
        self,
        settings: ModelConfig,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        *,
        adapter: Path | None,
        max_sequence_tokens: int,
        gpu_memory_share: float = 0.85,
        seed: int = 0,
    ) -> None:
        rank = served_rank(adapter) if adapter else None
        base_model.wait_without_spinning()
        import torch

        super().__init__(None, tokenizer, eos_token_ids)
        self._longest, self._calls = max_sequence_tokens, itertools.count()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        on_cpu = not torch.cuda.is_available()
        options: dict[str, Any] = {"gpu_memory_utilization": gpu_memory_share}
        if on_cpu:
            options = {**_CPU_ENGINE, "max_num_batched_tokens": max(_CPU_BATCH_TOKENS, max_sequence_tokens)}
        name, revision = base_model.source(settings.name), settings.revision
        if settings.bits == 4 and on_cpu:
            self._folder = tempfile.TemporaryDirectory(prefix="lora_grpo-unpacked-")
            plain_copy(base_model.load_base(settings)).save_pretrained(self._folder.name)
            name, revision = self._folder.name, None
        elif settings.bits == 4:
            options["quantization"] = "bitsandbytes"
        if rank:
            options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        for key, value in ((_CPU_SETTINGS if on_cpu else {}) | _SETTINGS).items():
            os.environ.setdefault(key, value)
        with _undisturbed():
            vllm = require("vllm.entrypoints.llm", extra="gpu", feature="--backend vllm")
            try:
                self._engine = vllm.LLM(
                    name,
                    revision=revision,
                    trust_remote_code=settings.trust_remote_code,
                    dtype=str(base_model.compute_dtype()).removeprefix("torch."),
                    max_model_len=max_sequence_tokens,
                    enable_prefix_caching=True,
                    # Token ids come in and go out, and what ends them is asked for: vLLM reads neither the tokenizer
                    # nor the settings for sampling that a model brings along.
                    skip_tokenizer_init=True,
                    generation_config="vllm",
                    seed=seed,
                    use_tqdm_on_load=False,
                    **options,
                ).llm_engine
            except (OSError, ValueError, RuntimeError) as error:
                raise RunError(
                    f"vLLM cannot serve {settings.name}: {_reason(error)}; use --backend transformers"
                ) from error
        self._adapter = self._request = self._load(adapter) if adapter else None

    def _load(self, adapter: Path) -> Any:
        """Hand the adapter to the engine and see that it is heard; return what asks for it."""
        from safetensors.torch import load_file
        from vllm.lora.request import LoRARequest

        request = LoRARequest("adapter", 1, str(adapter.resolve()))
        try:
            self._engine.add_lora(request)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            self.close()
            raise UserError(
                f"vLLM cannot serve the adapter in {adapter}: {_reason(error)}; use --backend transformers"
            ) from error
        weights = load_file(adapter / "adapter_model.safetensors")
        if any(bool(weight.any()) for name, weight in weights.items() if "lora_B" in name or "embedding_B" in name):
            base, again, adapted = map(self._log_probabilities, (None, None, request))
            noise = max(abs(one - other) for one, other in zip(base, again, strict=True))
            if max(abs(one - other) for one, other in zip(base, adapted, strict=True)) <= noise:
                self.close()
                raise RunError(
                    f"vLLM leaves the adapter in {adapter} out: log-probabilities are the same with it and without it; "
                    "use --backend transformers"
                )
        return request

    def _log_probabilities(self, request: Any) -> list[float]:
        """Return those of a few tokens after each other, with the adapter where it is requested."""
        from vllm import SamplingParams

        ids = self.encode(["Tom has 12 plums and buys 3 more. How many plums does Tom have now?"])[0]
        ids = ids[: self._longest - 1]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=0, detokenize=False)
        self._ask(f"check-{next(self._calls)}", ids, params, request)
        while True:
            for output in self._engine.step():
                first = dict(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True))
                places = [*zip(ids[1:], output.prompt_logprobs[1:], strict=True), *first.items()]
                return [place[token].logprob for token, place in places]

    def _ask(self, name: str, ids: list[int], params: Any, request: Any) -> None:
        self._engine.add_request(name, {"prompt_token_ids": ids}, params, lora_request=request)

    def refresh(self, *, adapter: bool) -> None:
        """Sample with the adapter, or from the base alone; takes hold at the next call."""
        self._request = self._adapter if adapter else None

    def find_slots(self, longest_prompt: int, max_tokens: int) -> int:
        """Return the most completions that vLLM decodes at once; it fits them to its memory itself."""
        at_once: int = self._engine.vllm_config.scheduler_config.max_num_seqs
        return at_once

    def rollouts(
        self,
        prompts: Sequence[str],
        num_samples: int,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | Sequence[int],
    ) -> list[list[Rollout]]:
        """Sample `num_samples` completions of each prompt; as `Sampler.rollouts`."""
        drawn = dict(
            self.stream(prompts, num_samples, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        )
        return [drawn[place] for place in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[str],
        num_samples: int,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | Sequence[int],
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """Yield (place of the prompt, its G rollouts) as soon as all of them have ended.

        The engine has all requests at once. Closing the generator early drops those that have not ended.

        Raises:
            UserError: a prompt leaves too little room.
            RunError: the engine gave up on a completion.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        total = len(prompts) * num_samples
        seeds = [_derived(seed, place) for place in range(total)] if isinstance(seed, int) else list(seed)
        if len(seeds) != total:
            raise ValueError(f"{len(seeds)} seeds for {total} completions; pass one each")
        if self._engine.has_unfinished_requests():
            raise RuntimeError("another stream of this sampler is under way; finish or close it first")
        ids = self.encode(prompts) if prompts else []
        longest = max(map(len, ids), default=0)
        if longest + max_tokens > self._longest:
            raise UserError(
                f"the longest prompt has {longest} tokens, and {max_tokens} more exceed the {self._longest} that the "
                "engine was started for; pass a smaller --max-completion-tokens"
            )
        call = next(self._calls)
        waiting = {f"{call}-{place}": place for place in range(total)}
        drawn: list[list[int]] = [[] for _ in range(total)]
        missing = [num_samples] * len(prompts)
        try:
            for name, place in waiting.items():
                params = SamplingParams(
                    max_tokens=max_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    seed=seeds[place] % 2**63,
                    stop_token_ids=self.eos_token_ids,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                self._ask(name, ids[place // num_samples], params, self._request)
            while waiting:
                if not self._engine.has_unfinished_requests():
                    raise RunError(f"vLLM lost {len(waiting)} of {total} completions; use --backend transformers")
                for output in self._engine.step():
                    [completion] = output.outputs
                    if completion.finish_reason not in ("stop", "length"):
                        raise RunError(
                            f"vLLM gave up on a completion ({completion.finish_reason}); use --backend transformers"
                        )
                    place = waiting.pop(output.request_id)
                    drawn[place] = list(completion.token_ids)
                    prompt = place // num_samples
                    missing[prompt] -= 1
                    if not missing[prompt]:
                        yield prompt, self._read(drawn[prompt * num_samples : (prompt + 1) * num_samples])
        finally:
            if waiting:
                self._engine.abort_request(list(waiting))

    def close(self) -> None:
        """End the engine and free what it holds, so that another model can be loaded; nothing can be drawn after it."""
        engine = self.__dict__.pop("_engine", None)
        if engine is not None:
            engine.engine_core.shutdown()
        del engine
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._folder is not None:
            self._folder.cleanup()


def _derived(seed: int, place: int) -> int:
    """Return a completion's own seed where one was given for all."""
    return int.from_bytes(hashlib.sha256(f"{seed} {place}".encode()).digest()[:8], "big")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let vLLM start quietly, and put back what it changes in the process around it."""
    import torch

    environment = {name: os.environ.get(name) for name in _BYSTANDERS}
    set_num_threads, disabled = torch.set_num_threads, logging.root.manager.disable
    # Other packages' warnings, about parts that are not used here, count as chatter as well.
    logging.disable(max(disabled, logging.WARNING))
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)  # progress bars, and what C++ writes
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            said.seek(0)
            os.write(terminal, said.read())
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
    """Return what is wrong in one sentence: a refused setting has it on its second line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    told = next((line.removeprefix("Value error, ") for line in lines if line.startswith("Value error, ")), None)
    return (told or first_line(error)).split(" [type=")[0].split(". ")[0].rstrip(".")
