"""One vLLM engine in this process: a frozen base, and the adapter that its requests name."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import ModelConfig
from lora_grpo.errors import RunError, UserError, first_line
from lora_grpo.models import base_model
from lora_grpo.optional import require
from lora_grpo.sampling.merged_copy import plain_copy
from lora_grpo.sampling.sampler import Draw

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
_GPU_BATCH_TOKENS = 4096
"""The same on a GPU: a few prompts at once fill it."""
_BYSTANDERS = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS")
"""Variables that vLLM sets for workers that it does not start here; programs that are graded would inherit them."""


def can_quantise() -> bool:
    """Tell whether this vLLM serves NF4 itself, on a GPU; from 0.28 on it needs a package of its own for it."""
    try:
        loader = importlib.util.find_spec("vllm.model_executor.model_loader.bitsandbytes_loader")
    except ModuleNotFoundError:
        loader = None
    return loader is not None


def served_rank(adapter: Path, flag: str = "--backend") -> int:
    """Return the rank that vLLM must make room for, from adapter_config.json alone.

    Args:
        adapter: a PEFT adapter's folder.
        flag: chooses between vLLM and transformers, for the message.

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
        raise UserError(f"vLLM cannot serve the adapter in {adapter} ({', '.join(reasons)}); use {flag} transformers")
    return min(served for served in RANKS if served >= rank)


class VllmEngine:
    """A base model in vLLM.

    Where vLLM cannot hold a 4-bit base (on a CPU), it gets a copy of the unpacked weights; the adapter lies beside it
    there too. Nothing is ever merged.

    Args:
        settings: the base model, and its bits.
        rank: what room is made for (`served_rank`); None serves no adapter.
        max_sequence_tokens: the most that a prompt and its completion take.
        gpu_memory_share: share of the GPU's memory for weights and cache, 0 to 1.
        seed: of vLLM's own random numbers; completions have their own seeds.
        flag: chooses between vLLM and transformers, for messages.
        model: the base where it is in memory already, to be unpacked from there.
        most_at_once: completions decoded together; None takes vLLM's own default.
        sleeps: made so that `sleep` lends its memory, where there is a GPU.

    Raises:
        UserError: vLLM is missing.
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
        most_at_once: int | None = None,
        sleeps: bool = False,
    ) -> None:
        base_model.wait_without_spinning()
        import torch

        self.longest, self.flag = max_sequence_tokens, flag
        self._calls, self._adapters = itertools.count(), itertools.count(1)
        self._served: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        on_cpu = not torch.cuda.is_available()
        self._sleeps = sleeps and not on_cpu
        options: dict[str, Any] = {
            "gpu_memory_utilization": gpu_memory_share,
            "enable_sleep_mode": self._sleeps,
            # vLLM's default, 8192 and more, is tried at the start and taken off the cache.
            "max_num_batched_tokens": max(_GPU_BATCH_TOKENS, max_sequence_tokens),
        }
        if on_cpu:
            options = {**_CPU_ENGINE, "max_num_batched_tokens": max(_CPU_BATCH_TOKENS, max_sequence_tokens)}
        if most_at_once:
            options["max_num_seqs"] = min(most_at_once, options.get("max_num_seqs", most_at_once))
        for key, value in ((_CPU_SETTINGS if on_cpu else {}) | _SETTINGS).items():
            os.environ.setdefault(key, value)
        name, revision = base_model.source(settings.name), settings.revision
        if settings.bits == 4 and not on_cpu and can_quantise():
            options["quantization"] = "bitsandbytes"
        elif settings.bits == 4:
            # One copy for all ranks; transformers (5.17) writes on rank 0 alone.
            name = distributed.broadcast_from_main(
                lambda: self._unpack(base_model.load_base(settings) if model is None else model)
            )
            revision = None
        if distributed.world_size() > 1:
            # An engine for each of them, in the process group that they have joined.
            options["distributed_executor_backend"] = "external_launcher"
        if rank:
            options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        with _undisturbed():
            vllm = require("vllm.entrypoints.llm", extra="gpu", feature=f"{flag} vllm")
            try:
                self._engine = vllm.LLM(
                    name,
                    revision=revision,
                    trust_remote_code=settings.trust_remote_code,
                    dtype=str(base_model.compute_dtype()).removeprefix("torch."),
                    max_model_len=max_sequence_tokens,
                    enable_prefix_caching=True,
                    # Those of the distribution that is drawn from, at its temperature and within its nucleus.
                    logprobs_mode="processed_logprobs",
                    # Token ids come in and go out, and what ends them is asked for: vLLM reads neither the tokenizer
                    # nor the settings for sampling that a model brings along.
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
        distributed.barrier()  # they read one copy
        self._forget_unpacked()

    def _forget_unpacked(self) -> None:
        """Delete the unpacked weights, which the engine has read."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _unpack(self, model: Any) -> str:
        """Write the base's weights in the precision of the activations to a folder, and return it."""
        self._folder = tempfile.TemporaryDirectory(prefix="lora_grpo-unpacked-")
        plain_copy(model).to(base_model.compute_dtype()).save_pretrained(self._folder.name)
        return self._folder.name

    @property
    def most_at_once(self) -> int:
        """The most completions that are decoded together; vLLM fits them to its memory itself."""
        at_once: int = self._engine.vllm_config.scheduler_config.max_num_seqs
        return at_once

    @property
    def busy(self) -> bool:
        """Whether completions are under way."""
        unfinished: bool = self._engine.has_unfinished_requests()
        return unfinished

    def hand_over(self, write: Callable[[Path], None]) -> Any:
        """Have an adapter written to an empty folder, and `load` it.

        Args:
            write: fills the folder.
        """
        with tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-") as folder:
            write(Path(folder))
            return self.load(Path(folder))

    def load(self, adapter: Path) -> Any:
        """Read an adapter in the place of the one before, and return what asks for it.

        Each gets a number and a name of its own: what vLLM has cached of a prompt is kept by the adapter's name.

        Args:
            adapter: a PEFT adapter's folder; not read again when this has returned.

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

    def draw(
        self, prompts: Sequence[list[int]], draw: Draw, seeds: Sequence[int], ends: list[int], request: Any, *,
        log_probs: bool,
    ) -> Iterator[tuple[int, list[int], list[float] | None]]:  # fmt: skip
        """Yield (place, token ids, their log-probabilities) of each completion as it ends.

        The engine has all of them at once. Closing the generator early drops those that have not ended.

        Args:
            prompts: R token ids, one for each completion.
            draw: how they are drawn.
            seeds: R, one for each completion.
            ends: the tokens that end a completion.
            request: what `load` returned, or None for the base alone.
            log_probs: False where they are not wanted, and are None.

        Raises:
            RunError: the engine gave up on a completion.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self.busy:
            raise RuntimeError("another stream of this sampler is under way; finish or close it first")
        call = next(self._calls)
        waiting = {f"{call}-{place}": place for place in range(len(prompts))}
        try:
            for name, place in waiting.items():
                params = SamplingParams(
                    max_tokens=draw.max_tokens,
                    temperature=draw.temperature,
                    top_p=draw.top_p,
                    seed=seeds[place] % 2**63,
                    stop_token_ids=ends,
                    detokenize=False,
                    logprobs=0 if log_probs else None,  # of the token that was drawn, and no other
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                self._engine.add_request(name, {"prompt_token_ids": prompts[place]}, params, lora_request=request)
            while waiting:
                if not self.busy:
                    raise RunError(
                        f"vLLM lost {len(waiting)} of {len(prompts)} completions; use {self.flag} transformers"
                    )
                for output in self._engine.step():
                    [completion] = output.outputs
                    if completion.finish_reason not in ("stop", "length"):
                        raise RunError(
                            f"vLLM gave up on a completion ({completion.finish_reason}); use {self.flag} transformers"
                        )
                    told = token_log_probs(completion) if log_probs else None
                    yield waiting.pop(output.request_id), list(completion.token_ids), told
        finally:
            if waiting:
                self._engine.abort_request(list(waiting))

    def prompt_log_probs(self, ids: list[int], request: Any) -> list[float]:
        """Return the log-probabilities of a text's tokens, and of the one that would follow it.

        Args:
            ids: of its tokens.
            request: what `load` returned, or None for the base alone.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=0, detokenize=False)
        name = f"check-{next(self._calls)}"
        self._engine.add_request(name, {"prompt_token_ids": ids}, params, lora_request=request)
        while True:
            for output in self._engine.step():
                first = dict(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True))
                places = [*zip(ids[1:], output.prompt_logprobs[1:], strict=True), *first.items()]
                return [place[token].logprob for token, place in places]

    def sleep(self) -> None:
        """Move the weights to the host's memory and let go of the cache, where the engine was made for it."""
        if self._sleeps and not self._engine.is_sleeping():
            self._engine.sleep(level=1)

    def wake(self) -> None:
        """Take back what `sleep` let go of."""
        if self._sleeps and self._engine.is_sleeping():
            import torch

            gc.collect()
            torch.cuda.empty_cache()  # vLLM's memory is none of the allocator's
            self._engine.wake_up()

    def close(self) -> None:
        """End the engine and free what it holds, so that another model can be loaded."""
        engine = self.__dict__.pop("_engine", None)
        if engine is not None:
            engine.engine_core.shutdown()
        del engine
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._forget_unpacked()


def token_log_probs(completion: Any) -> list[float]:
    """Return the log-probability of each token of a completion that was asked for with `logprobs=0`."""
    return [place[token].logprob for token, place in zip(completion.token_ids, completion.logprobs, strict=True)]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let vLLM start quietly, and put back what it changes in the process around it."""
    import torch

    # vLLM makes a process group of one, which transformers takes for a badly launched run.
    logging.getLogger("transformers.training_args").addFilter(lambda said: "parallel_mode" not in said.getMessage())
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
