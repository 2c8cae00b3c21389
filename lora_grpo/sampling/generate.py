"""Sample with the model's own `generate`, to evaluate with Unsloth. Its trainer generates the rollouts itself."""

from __future__ import annotations

from collections.abc import Sequence

from lora_grpo.sampling.sampler import Decoded, Sampler, SamplingParams


class GenerateSampler(Sampler):
    """Samples with the model's own `generate`, for an engine that replaces the forward pass.

    `generate` uses torch's global generator. Only the first seed is used, and a completion depends on the rest of its
    batch. A batch starts only after the previous one is finished.
    """

    serves_training = False

    def _decode(self, prompts: list[list[int]], params: SamplingParams, seeds: Sequence[int]) -> list[Decoded]:
        import torch

        rows = [ids for ids in prompts for _ in range(params.num_samples)]
        size = self.batch_size or len(rows)
        torch.manual_seed(seeds[0])
        batches = (self._generate(rows[start : start + size], params) for start in range(0, len(rows), size))
        return [(ids, None) for batch in batches for ids in batch]

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
