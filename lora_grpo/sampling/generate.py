"""Samplers for Unsloth. They are used for evaluation, because Unsloth's trainer generates the rollouts itself."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from lora_grpo.sampling.sampler import Sampler, SamplingParams
from lora_grpo.sampling.vllm_engine import token_logprobs


class GenerateSampler(Sampler):
    """Samples with the model's own `generate`, for an engine that replaces the forward pass.

    `generate` uses torch's global generator. Only the first seed is used, and a completion depends on the rest of its
    batch. A batch starts only after the previous one is finished.
    """

    serves_training = False

    def _decode(
        self, prompts: list[list[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[list[list[int]], None]:
        import torch

        rows = [ids for ids in prompts for _ in range(params.num_samples)]
        size = self.batch_size or len(rows)
        torch.manual_seed(seeds[0])
        batches = (self._generate(rows[start : start + size], params) for start in range(0, len(rows), size))
        return [ids for batch in batches for ids in batch], None

    def _generate(self, rows: list[list[int]], params: SamplingParams) -> list[list[int]]:
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        device = next(self.model.parameters()).device
        sampling = {"do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": 0}
        output = self.model.generate(
            **batch.to(device),
            **(sampling if params.temperature else {"do_sample": False}),
            max_new_tokens=params.max_tokens,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        eos = set(self.eos_token_ids)
        sampled = output[:, batch["input_ids"].shape[1] :].tolist()
        return [ids[: next((n for n, token in enumerate(ids, start=1) if token in eos), len(ids))] for ids in sampled]


class SharedVllmSampler(Sampler):
    """Samples from the vLLM engine of Unsloth's `fast_inference`, which shares the weights of the trained model.

    The adapter is loaded as a LoRA request and never merged.
    """

    serves_training = False

    def wake_up(self, *, adapter: bool) -> None:
        """Save and select the current adapter, or select the base model."""
        engine = self.model.vllm_engine
        if engine.llm_engine.is_sleeping():
            engine.wake_up()
        self._request = None
        if adapter:
            self._folder = tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-")
            self.model.save_lora(self._folder.name)
            self._request = self.model.load_lora(self._folder.name)

    def fit_batch(self, prompts: Sequence[str], max_tokens: int) -> None:
        """Do nothing, because vLLM fits the batch to its memory."""

    def _decode(
        self, prompts: list[list[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        import vllm

        requests = [{"prompt_token_ids": ids} for ids in prompts for _ in range(params.num_samples)]
        each = [
            vllm.SamplingParams(
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                seed=seed % 2**31,
                stop_token_ids=self.eos_token_ids,
                logprobs=0,  # only for the sampled token
            )
            for seed in seeds
        ]
        results = self.model.fast_generate(requests, each, use_tqdm=False, lora_request=self._request)
        outputs = [output for result in results for output in result.outputs]
        return [list(output.token_ids) for output in outputs], [token_logprobs(output) for output in outputs]
