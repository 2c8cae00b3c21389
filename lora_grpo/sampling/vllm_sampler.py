"""Sample with vLLM. The base model is loaded once, and only the adapter is replaced."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_grpo.errors import RunError, UserError
from lora_grpo.sampling.sampler import SampledTokens, Sampler, SamplingParams, check_seeds
from lora_grpo.sampling.vllm_adapter import write_adapter
from lora_grpo.sampling.vllm_engine import VllmEngine
from lora_grpo.sampling.vllm_server import VllmServer


class VllmSampler(Sampler):
    """Samples with a vLLM engine or server, from a policy in training or from a saved adapter in evaluation.

    TRL's own vLLM mode merges the adapter into the base and unmerges it at every step, which rounds a 4-bit base each
    time. This class never changes the base. Each `wake_up` loads a few megabytes of adapter weights under a new name.
    The random numbers of a completion depend only on its seed. Its logits may differ by rounding, depending on the rest
    of the batch.

    Args:
        engine: engine or server with the base model.
        tokenizer: tokenizer of the model.
        eos_token_ids: tokens that end a completion.
        policy: the PEFT model in training. Its adapter is loaded at each `wake_up`.
        adapter: folder of a saved adapter, which is loaded once.

    Raises:
        UserError: vLLM cannot serve this adapter.
        RunError: the engine ignores the adapter.
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
        self.serves_training = self.is_other_engine = policy is not None
        self._request: Any = None
        self._saved: Any = None
        if adapter is not None:
            try:
                self._saved = self._load_saved(adapter)
            except (UserError, RunError):
                self.close()
                raise

    def _load_saved(self, adapter: Path) -> Any:
        """Load an adapter, check that it changes the logits, and return its LoRARequest."""
        from safetensors.torch import load_file

        assert isinstance(self.engine, VllmEngine)
        request = self.engine.load_adapter(adapter)
        weights = load_file(adapter / "adapter_model.safetensors")
        if any(bool(weight.any()) for name, weight in weights.items() if "lora_B" in name or "embedding_B" in name):
            ids = self.encode(["Tom has 12 plums and buys 3 more. How many plums does Tom have now?"])[0]
            ids = ids[: self.engine.max_sequence_tokens - 1]
            base, again, adapted = (self.engine.prompt_logprobs(ids, each) for each in (None, None, request))
            noise = max(abs(one - other) for one, other in zip(base, again, strict=True))
            if max(abs(one - other) for one, other in zip(base, adapted, strict=True)) <= noise:
                raise RunError(
                    f"vLLM ignores the adapter in {adapter}: logprobs are the same with and without it; "
                    "use --backend transformers"
                )
        return request

    def wake_up(self, *, adapter: bool) -> None:
        """Load the current adapter of the policy, or select the saved adapter or the base model."""
        self.engine.wake_up()
        self._request = self._saved if adapter else None
        if adapter and self.model is not None:
            with tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-") as folder:
                write_adapter(self.model, Path(folder))
                self._request = self.engine.load_adapter(Path(folder))

    def sleep(self) -> None:
        """Release GPU memory until the next `wake_up`."""
        self.engine.sleep()

    def fit_batch(self, prompts: Sequence[str], max_tokens: int) -> None:
        """Do nothing, because vLLM fits the batch to its memory."""

    def stream(
        self, prompts: Sequence[str], params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Yield (index of the prompt, its completions) when all completions of a prompt are finished.

        All requests are submitted at once. If the generator is closed early, unfinished requests are aborted.

        Raises:
            RunError: the engine aborted a completion.
        """
        group = params.num_samples
        check_seeds(seeds, len(prompts) * group)
        requests = [ids for ids in self.encode(prompts) for _ in range(group)]
        wants_logprobs = self.serves_training and params.temperature > 0  # none for greedy decoding
        ended: list[dict[int, tuple[list[int], list[float] | None]]] = [{} for _ in prompts]
        for index, token_ids, logprobs in self.engine.stream(
            requests, params, seeds, self.eos_token_ids, self._request, logprobs=wants_logprobs
        ):
            whole = ended[index // group]
            whole[index] = token_ids, logprobs
            if len(whole) == group:
                in_order = [whole.pop(each) for each in sorted(whole)]
                each_logprobs = [logprobs or [] for _, logprobs in in_order] if wants_logprobs else None
                yield index // group, self._to_samples([ids for ids, _ in in_order], each_logprobs)

    def close(self) -> None:
        """Shut down the engine. The sampler cannot be used afterwards."""
        self.engine.close()
