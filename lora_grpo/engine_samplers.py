"""Samplers for engines that draw their own training rollouts; they serve evaluation."""

from __future__ import annotations

from lora_grpo.rollouts import Draw, Sampler


class GenerateSampler(Sampler):
    """Samples by the model's own `generate`, for an engine that replaces the forward pass behind it.

    Such an engine's trainer draws its rollouts that way too, so this sampler serves evaluation.
    """

    serves_training = False

    def _decode(self, prompts: list[list[int]], draw: Draw) -> list[list[int]]:
        import torch

        batch = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        device = next(self.model.parameters()).device
        torch.manual_seed(draw.seed)
        drawing = {"do_sample": True, "temperature": draw.temperature, "top_p": draw.top_p, "top_k": 0}
        output = self.model.generate(
            **batch.to(device),
            **(drawing if draw.temperature else {"do_sample": False}),
            num_return_sequences=draw.num_samples,
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

    def _decode(self, prompts: list[list[int]], draw: Draw) -> list[list[int]]:
        from vllm import SamplingParams

        # One seed for all prompts would give equal prompts equal samples; a seed each keeps groups apart.
        each = [
            SamplingParams(
                n=draw.num_samples,
                max_tokens=draw.max_tokens,
                temperature=draw.temperature,
                top_p=draw.top_p,
                seed=(draw.seed + 7919 * place) % 2**31,
                stop_token_ids=self.eos_token_ids,
            )
            for place in range(len(prompts))
        ]
        results = self.model.fast_generate(
            [{"prompt_token_ids": ids} for ids in prompts], each, use_tqdm=False, lora_request=self._request
        )
        return [list(output.token_ids) for result in results for output in result.outputs]
