"""Samplers for engines that draw their own training rollouts; they serve evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from lora_grpo.sampling.sampler import Draw, Drawn, Sampler
from lora_grpo.sampling.vllm_engine import token_log_probs


class GenerateSampler(Sampler):
    """Samples by the model's own `generate`, for an engine that replaces the forward pass behind it.

    Such an engine's trainer draws its rollouts that way too, so this sampler serves evaluation. Of several seeds it
    uses the first alone: `generate` draws from torch's one generator, so a completion's draws depend on its neighbours.
    `slots` completions at most are one batch, which ends before the next begins.
    """

    serves_training = False

    def _decode(self, prompts: list[list[int]], draw: Draw) -> Drawn:
        import torch

        rows = [ids for ids in prompts for _ in range(draw.num_samples)]
        size = self.slots or len(rows)
        torch.manual_seed(draw.seed if isinstance(draw.seed, int) else draw.seed[0])
        batches = (self._generate(rows[start : start + size], draw) for start in range(0, len(rows), size))
        return Drawn([ids for batch in batches for ids in batch])

    def _generate(self, rows: list[list[int]], draw: Draw) -> list[list[int]]:
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        device = next(self.model.parameters()).device
        drawing = {"do_sample": True, "temperature": draw.temperature, "top_p": draw.top_p, "top_k": 0}
        output = self.model.generate(
            **batch.to(device),
            **(drawing if draw.temperature else {"do_sample": False}),
            max_new_tokens=draw.max_tokens,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        ends = set(self.eos_token_ids)
        drawn = output[:, batch["input_ids"].shape[1] :].tolist()
        return [ids[: next((n for n, token in enumerate(ids, start=1) if token in ends), len(ids))] for ids in drawn]


class SharedVllmSampler(Sampler):
    """Samples from the vLLM engine that Unsloth's `fast_inference` runs on the training model's own weights.

    Unsloth's trainer draws its rollouts from that engine too, so this one serves evaluation. The adapter is handed over
    as a LoRA request, never merged.
    """

    serves_training = False

    def refresh(self, *, adapter: bool) -> None:
        """Save the adapter as it is now and ask for it, or for none."""
        import tempfile

        engine = self.model.vllm_engine
        if engine.llm_engine.is_sleeping():
            engine.wake_up()
        self._request = None
        if adapter:
            self._folder = tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-")
            self.model.save_lora(self._folder.name)
            self._request = self.model.load_lora(self._folder.name)

    def find_batch_size(self, longest_prompt: int, max_tokens: int) -> int:
        """Return vLLM's own default; it fits the batch to its memory itself, so `slots` stays None."""
        return 256

    def _decode(self, prompts: list[list[int]], draw: Draw) -> Drawn:
        from vllm import SamplingParams

        if isinstance(draw.seed, int):
            # One seed for all prompts would give equal prompts equal samples; a seed each keeps groups apart.
            requests, num_samples = prompts, draw.num_samples
            seeds: Sequence[int] = [draw.seed + 7919 * place for place in range(len(prompts))]
        else:
            requests, num_samples = [ids for ids in prompts for _ in range(draw.num_samples)], 1
            seeds = draw.seed
        each = [
            SamplingParams(
                n=num_samples,
                max_tokens=draw.max_tokens,
                temperature=draw.temperature,
                top_p=draw.top_p,
                seed=seed % 2**31,
                stop_token_ids=self.eos_token_ids,
                logprobs=0,  # of the token that was drawn, and no other
            )
            for seed in seeds
        ]
        results = self.model.fast_generate(
            [{"prompt_token_ids": ids} for ids in requests], each, use_tqdm=False, lora_request=self._request
        )
        outputs = [output for result in results for output in result.outputs]
        return Drawn([list(output.token_ids) for output in outputs], [token_log_probs(output) for output in outputs])
