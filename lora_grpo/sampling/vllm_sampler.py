"""Sample with vLLM, by an engine in this process or by a server.

The frozen base model is loaded once, and only its adapter is replaced, which is never merged.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.files import disk
from lora_grpo.memory import estimate
from lora_grpo.models import ADAPTER_WEIGHTS, SELECTION, read_adapter
from lora_grpo.sampling.requests import Request, RequestQueue
from lora_grpo.sampling.sampler import Sampler
from lora_grpo.sampling.samples import Decoded, Prompts, SampledTokens, SamplingParams
from lora_grpo.sampling.streams import by_prompt
from lora_grpo.sampling.vllm_engine import VllmEngine
from lora_grpo.sampling.vllm_server import VllmServer


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
        self.returns_logprobs = self.serves_training  # evaluations need none
        self._saved_adapter = self._load_saved(adapter) if adapter else None
        self._adapter: Any = None
        """The adapter to sample with, as the engine names it; None for the base model."""

    def _load_saved(self, adapter: Path) -> Any:
        """Load an adapter, check that it changes the logits, and return the engine's name for it."""
        from safetensors.torch import load_file

        loaded_adapter = self.engine.load_adapter(adapter)

        # A new adapter changes nothing: its B is zero.
        weights = load_file(adapter / ADAPTER_WEIGHTS)
        output_weights = [weight for name, weight in weights.items() if "lora_B" in name or "embedding_B" in name]
        is_new = not any(weight.any() for weight in output_weights)

        prompt_ids = self.encode(["How many plums does Tom have now?"])
        params = SamplingParams(num_samples=1, temperature=1.0, top_p=1.0, max_tokens=8)
        options = request_options(params, [0], self.eos_token_ids, logprobs=True)
        without_adapter = list(self.engine.stream(prompt_ids, options, None))
        with_adapter = list(self.engine.stream(prompt_ids, options, loaded_adapter))
        if with_adapter == without_adapter and not is_new:
            raise RunError(
                f"vLLM ignores the adapter in {adapter}: tokens and logprobs are the same with and without it; "
                "select the transformers backend"
            )
        return loaded_adapter

    def wake_up(self, *, adapter: bool) -> None:
        """Load the policy's current adapter, or select the saved adapter or the base model."""
        started = time.perf_counter()
        self.engine.wake_up()
        awake = time.perf_counter()
        self._adapter = self._saved_adapter if adapter else None
        if adapter and self.model is not None:
            self._adapter = self._load_policy()
        self.phase_seconds = {"engine_wake_up": awake - started, "adapter_sync": time.perf_counter() - awake}

    def _load_policy(self) -> Any:
        """Load the policy's current adapter, and return the engine's name for it."""
        weights = adapter_weights(self.model, self.engine.adapter_dtype)
        num_bytes = sum(weight.nbytes for weight in weights.values())
        with tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-", dir=_folder_in_memory(num_bytes)) as folder:
            write_adapter(self.model, weights, Path(folder))
            return self.engine.load_adapter(Path(folder))

    def sleep(self) -> None:
        """Release GPU memory until the next `wake_up`."""
        self.engine.sleep()

    def stream(
        self, prompts: Prompts, params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Yield (index of the prompt, its completions) when all completions of a prompt are finished."""
        requests = [ids for ids in self.encode(prompts) for _ in range(params.num_samples)]
        wants_logprobs = self.returns_logprobs and params.temperature > 0  # none for greedy decoding
        options = request_options(params, seeds, self.eos_token_ids, logprobs=wants_logprobs)
        finished = self.engine.stream(requests, options, self._adapter)
        for prompt_index, decoded in by_prompt(finished, params.num_samples):
            yield prompt_index, self.to_samples(decoded, params)

    def _serve(self, queue: RequestQueue) -> None:
        """Sample requests as they come."""
        serve_engine(self, self.engine, queue, self._adapter, logprobs=True)

    def close(self) -> None:
        """Shut down the engine."""
        self.engine.close()


_SHARED_MEMORY = Path("/dev/shm")  # a file system in memory, on Linux


def _folder_in_memory(num_bytes: int) -> Path | None:
    """Return the folder whose files are in memory if it has room for an adapter, else None: the temporary folder.

    A container's may be small: Docker's default is 64 MiB.
    """
    can_write = os.access(_SHARED_MEMORY, os.W_OK)
    if can_write and disk.free_space(_SHARED_MEMORY).num_bytes > 2 * num_bytes:
        return _SHARED_MEMORY
    return None


def adapter_weights(model: Any, dtype: Any) -> dict[str, Any]:
    """Return the trained adapter of a PEFT model by the names of its file, on the CPU.

    Args:
        dtype: of the weights. vLLM rounds float32 weights to its own dtype when it loads them, so weights in that dtype
            give the same results.
    """
    from peft import get_peft_model_state_dict

    # Otherwise PEFT queries the Hub to find out whether the vocabulary was resized.
    weights = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    return {name: weight.detach().to(dtype).cpu().contiguous() for name, weight in weights.items()}


def write_adapter(model: Any, weights: dict[str, Any], folder: Path) -> None:
    """Write an adapter to a folder, as PEFT does except for its model card.

    Args:
        weights: the result of `adapter_weights`.
    """
    from safetensors.torch import save_file

    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    # safetensors makes the file private, but a server may run as another user.
    (folder / ADAPTER_WEIGHTS).chmod(0o644)
    model.peft_config["default"].save_pretrained(folder)


def request_options(
    params: SamplingParams, seeds: Sequence[int], eos_token_ids: list[int], *, logprobs: bool
) -> list[dict[str, Any]]:
    """Return the options of each completion, by their names in vLLM's Python and HTTP interfaces.

    They include everything that a server would otherwise read from the model's generation_config.json.
    """
    common_options = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": eos_token_ids,
        "logprobs": 0 if logprobs else None,  # only for the sampled token
    }
    options = []
    for index, seed in enumerate(seeds):
        options.append({**common_options, "seed": seed, "max_tokens": params.token_limit(index)})
    return options


def serve_engine(
    sampler: Sampler, engine: VllmEngine | VllmServer, queue: RequestQueue, adapter: Any, *, logprobs: bool
) -> None:
    """Let an engine sample requests as they come; see `Sampler.serve`.

    Args:
        adapter: the engine's name for the adapter with which the sampler is awake, or None.
        logprobs: whether completions that are not decoded greedily have logprobs.
    """

    def task_of(request: Request) -> tuple[dict[str, Any], Any]:
        wants_logprobs = logprobs and request.temperature > 0
        [options] = request_options(request.params, [request.seed], sampler.eos_token_ids, logprobs=wants_logprobs)
        return options, adapter if request.adapter else None

    def sample_of(request: Request, decoded: Decoded) -> SampledTokens:
        [sample] = sampler.to_samples([decoded], request.params)
        return sample

    engine.serve(queue, task_of, sample_of)


def served_rank(adapter: Path) -> int:
    """Return `estimate.reserved_rank` for a saved adapter, or raise a UserError if vLLM cannot serve it."""
    saved_adapter = read_adapter(adapter)
    saved_adapter.check(SELECTION, "which vLLM does not serve; select the transformers backend")
    return estimate.reserved_rank(saved_adapter.r)
