"""Targets in this process: the adapter in an engine of this kit, and merged models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_grpo.files import main_dtype, model_tensors
from lora_grpo.models import ModelSpec, base_model, tokenizer_of
from lora_grpo.prompts import chat
from lora_grpo.sampling import Sampler, SamplingParams, build, completion_seed
from lora_grpo.verify.targets import IN_16_BITS, IN_32_BITS, Answer, Messages, TargetFacts


class LocalTarget:
    """A model that is loaded in this process.

    Args:
        name: how the user named it.
        spec: the adapter and its base, or a merged model.
        backend: the engine of the sampler, `transformers` or `vllm`.
        sampler: samples from the model.
    """

    def __init__(self, name: str, spec: ModelSpec, backend: str, sampler: Sampler) -> None:
        self.name = name
        self._spec = spec
        self._backend = backend
        self._sampler = sampler
        sampler.returns_logprobs = True

    def facts(self) -> TargetFacts:
        return TargetFacts(
            program=build.describe(self._spec, self._backend, self._sampler)["engine"],
            weight_type=self._weight_type(),
            engine_rounding=IN_32_BITS if base_model.compute_dtype().itemsize == 4 else IN_16_BITS,
            context_tokens=self._spec.context_tokens,
            end_token_ids=tuple(self._sampler.eos_token_ids),
        )

    def _weight_type(self) -> str:
        """Return the type of the stored weights, or that of the computation if it has fewer bits."""
        computed = str(base_model.compute_dtype()).removeprefix("torch.")
        if self._spec.adapter is not None or self._spec.base.loaded_bits == 4:
            return computed
        if computed != "float32":
            return computed
        return main_dtype(model_tensors(Path(self._spec.base.name)).values())

    def sample(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer | None]:
        params = SamplingParams(1, temperature=1.0, top_p=1.0, max_tokens=max_tokens)
        seeds = [completion_seed(0, "verify", index) for index in range(len(prompts))]
        groups = self._sampler.sample(prompts, params, seeds)
        return [Answer(sample.token_ids, sample.logprobs, not sample.truncated) for [sample] in groups]

    def render(self, messages: Messages) -> list[int]:
        text = chat.render_prompt(self._sampler.tokenizer, [dict(message) for message in messages])
        [token_ids] = self._sampler.encode([text])
        return token_ids

    def chat(self, prompts: Sequence[Messages], max_tokens: int) -> None:
        """Return None: this process renders and ends completions as `render` and `facts` say."""

    def close(self) -> None:
        self._sampler.close()


def open_local(name: str, spec: ModelSpec, backend: str, sequence_tokens: int) -> LocalTarget:
    """Load a model with transformers or vLLM, and return it as a target.

    Args:
        sequence_tokens: maximum length of a prompt and its completion.
    """
    sampler = build.load_sampler(spec, build.choose_backend(backend), tokenizer_of(spec), sequence_tokens, seed=0)
    return LocalTarget(name, spec, backend, sampler)
