"""Sample with vLLM. The base model is loaded once, and only the adapter is replaced."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.models import ADAPTER_WEIGHTS, SELECTION, memory, read_adapter
from lora_grpo.sampling.completions import by_prompt
from lora_grpo.sampling.sampler import SampledTokens, Sampler, SamplingParams
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
                _write_adapter(self.model, Path(folder))
                self._adapter = self.engine.load_adapter(Path(folder))

    def sleep(self) -> None:
        """Release GPU memory until the next `wake_up`."""
        self.engine.sleep()

    def fit_batch(self, prompts: Sequence[str], max_tokens: int) -> None:
        """Do nothing, because vLLM fits the batch to its memory."""

    def stream(
        self, prompts: Sequence[str], params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Yield (index of the prompt, its completions) when all completions of a prompt are finished."""
        group = params.num_samples
        requests = [ids for ids in self.encode(prompts) for _ in range(group)]
        wants_logprobs = self.serves_training and params.temperature > 0  # none for greedy decoding
        options = request_options(params, seeds, self.eos_token_ids, logprobs=wants_logprobs)
        for index, decoded in by_prompt(self.engine.stream(requests, options, self._adapter), group):
            yield index, self._to_samples(decoded)

    def close(self) -> None:
        """Shut down the engine."""
        self.engine.close()


def request_options(
    params: SamplingParams, seeds: Sequence[int], eos_token_ids: list[int], *, logprobs: bool
) -> list[dict[str, Any]]:
    """Return the options of each completion, by their names in vLLM's Python and HTTP interfaces.

    They include everything that a server would otherwise read from the model's generation_config.json.
    """
    shared = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": eos_token_ids,
        "logprobs": 0 if logprobs else None,  # only for the sampled token
    }
    return [{**shared, "seed": seed} for seed in seeds]


def served_rank(adapter: Path) -> int:
    """Return `memory.reserved_rank` for a saved adapter, or raise a UserError if vLLM cannot serve it."""
    saved = read_adapter(adapter)
    saved.check(SELECTION, "which vLLM does not serve; select the transformers backend")
    return memory.reserved_rank(saved.r)


def _write_adapter(model: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    # Otherwise PEFT queries the Hub to find out whether the vocabulary was resized.
    state = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    weights = folder / ADAPTER_WEIGHTS
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights)
    weights.chmod(0o644)  # safetensors makes the file private, but a server may run as another user
    model.peft_config["default"].save_pretrained(folder)
