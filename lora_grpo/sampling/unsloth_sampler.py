"""Sample from a model that Unsloth trains, with its vLLM engine or with `generate`. Its trainer makes the rollouts."""

import tempfile
from collections.abc import Callable, Iterator, Sequence

from lora_grpo.sampling.requests import RequestQueue
from lora_grpo.sampling.sampler import Sampler
from lora_grpo.sampling.samples import Decoded, Prompts, SampledTokens, SamplingParams
from lora_grpo.sampling.streams import by_prompt
from lora_grpo.sampling.vllm_engine import VllmEngine
from lora_grpo.sampling.vllm_sampler import request_options, serve_engine


class SharedVllmSampler(Sampler):
    """Samples from the vLLM engine that Unsloth's `fast_inference` creates. It shares the trained model's weights.

    The adapter is loaded as a LoRA request and never merged.
    """

    serves_training = False
    streams = True

    def wake_up(self, *, adapter: bool) -> None:
        """Save and select the current adapter, or select the base model."""
        engine = self.model.vllm_engine
        if engine.llm_engine.is_sleeping():
            engine.wake_up()
        self._adapter = None
        if adapter:
            self._folder = tempfile.TemporaryDirectory(prefix="lora_grpo-adapter-")
            self.model.save_lora(self._folder.name)
            self._adapter = self.model.load_lora(self._folder.name)

    def sleep(self) -> None:
        """Release vLLM's cache until the next `wake_up`. TRL's trainer also wakes the engine up before its rollouts."""
        engine = self.model.vllm_engine
        # Unsloth's standby mode patches vLLM's allocator to leave the weights, which are the trained ones, in place.
        if engine.model_config.enable_sleep_mode and not engine.llm_engine.is_sleeping():
            engine.sleep(level=1)

    def stream(
        self, prompts: Prompts, params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Yield (index of the prompt, its completions) when all completions of a prompt are finished."""
        engine = VllmEngine(self.model.vllm_engine.llm_engine, sleeps=False)
        requests = [ids for ids in self.encode(prompts) for _ in range(params.num_samples)]
        options = request_options(params, seeds, self.eos_token_ids, logprobs=True)
        finished = engine.stream(requests, options, self._adapter)
        for prompt_index, decoded in by_prompt(finished, params.num_samples):
            yield prompt_index, self.to_samples(decoded, params)

    def _serve(self, queue: RequestQueue) -> None:
        """Sample requests as they come."""
        engine = VllmEngine(self.model.vllm_engine.llm_engine, sleeps=False)
        serve_engine(self, engine, queue, self._adapter, logprobs=True)


class GenerateSampler(Sampler):
    """Samples with the model's own `generate`, because Unsloth replaces the forward pass.

    `generate` uses torch's global generator. Only the first seed is used, and a completion depends on the rest of its
    batch. A batch starts only after the previous one is finished.
    """

    serves_training = False

    def _decode(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        on_finished: Callable[[int, Decoded], object],
        is_canceled: Callable[[int], bool] | None = None,
    ) -> None:
        import torch

        # `generate` cannot end a row early, so canceled completions are decoded with the others.
        batch_size = self.batch_size or len(prompts)
        torch.manual_seed(seeds[0])
        for start in range(0, len(prompts), batch_size):
            completions = self._generate(prompts[start : start + batch_size], params)
            for index, ids in enumerate(completions, start):
                on_finished(index, Decoded(ids[: params.token_limit(index)], logprobs=None))

    def _generate(self, rows: list[list[int]], params: SamplingParams) -> list[list[int]]:
        """Return the token ids of a completion of each of R rows, up to its end-of-sequence token."""
        if params.temperature:
            selection = {"do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": 0}
        else:
            selection = {"do_sample": False}
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        output = self.model.generate(
            **batch.to(self.model.device),
            **selection,
            max_new_tokens=params.max_tokens,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.tokenizer.pad_token_id,
        )

        # `generate` goes on until the last row ends, and pads the others.
        prompt_length = batch["input_ids"].shape[1]
        ends = set(self.eos_token_ids)
        completions = []
        for ids in output[:, prompt_length:].tolist():
            lengths_at_ends = [length for length, token in enumerate(ids, start=1) if token in ends]
            completions.append(ids[: min(lengths_at_ends, default=len(ids))])
        return completions
