"""Sample a GGUF file with llama.cpp, and render its prompts with its own template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.sampling.completions import by_prompt, in_threads
from lora_grpo.sampling.gguf_model import GgufModel
from lora_grpo.sampling.llama_cpp_server import LlamaServer
from lora_grpo.sampling.sampler import SampledTokens, Sampler, SamplingParams
from lora_grpo.tasks import Row

_SLOTS = 8
"""Number of completions that are decoded at once."""
_TEMPLATE_TOKENS = 1024
"""More tokens than any chat template adds to the messages of a row."""
_ONLY_TEMPERATURE_AND_TOP_P = {"samplers": ["temperature", "top_p"], "mirostat": 0}
"""Turns off all other samplers of llama.cpp: penalties, DRY, XTC, top-k, min-p, typical-p, and what a GGUF's metadata
set. In this order as in `sampling.select_tokens`; llama.cpp's own order applies top-p before the temperature."""


class GgufTokenizer:
    """The part of a transformers tokenizer that `lora_grpo.tasks.chat` uses, on the tokenizer in a GGUF file."""

    special_tokens_map = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
    """Names that chat templates read and that llama.cpp sets."""

    def __init__(self, server: LlamaServer, chat_template: str | None) -> None:
        self._server, self.chat_template = server, chat_template
        self._rendered: dict[str, str] = {}

    def get_chat_template(self) -> str | None:
        return self.chat_template

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str:
        """Return the prompt of messages, without the BOS token that the server adds itself."""
        assert not tokenize and add_generation_prompt
        body = {"messages": list(messages), "chat_template_kwargs": variables}
        key = json.dumps(body)
        if key not in self._rendered:
            self._rendered[key] = str(self._server.post("/apply-template", body)["prompt"])
        return self._rendered[key]

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        bodies = ({"content": text, "add_special": True, "parse_special": True} for text in texts)
        return {"input_ids": [self._server.post("/tokenize", body)["tokens"] for body in bodies]}


class GgufSampler(Sampler):
    """Samples with a llama.cpp server.

    The random numbers of a completion depend only on its seed. They are not those of the other samplers, and logits may
    differ by rounding, depending on what else is decoded.
    """

    serves_training = False
    streams = True

    def __init__(self, file: GgufModel, server: LlamaServer) -> None:
        super().__init__(None, GgufTokenizer(server, file.chat_template), ())
        self._server = server

    def describe(self) -> dict[str, Any]:
        """Describe how completions are sampled, for the report."""
        return {"engine": f"llama.cpp {self._server.build}"}

    def wake_up(self, *, adapter: bool) -> None:
        """Do nothing. The adapter is merged."""

    def fit_batch(self, prompts: Sequence[str], max_tokens: int) -> None:
        """Do nothing, because the server has its memory from the start."""

    def stream(
        self, prompts: Sequence[str], params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Return an iterator over (index of the prompt, its completions). See `Sampler.stream`."""

        def complete(index: int) -> SampledTokens:
            return self._complete(prompts[index // params.num_samples], params, seeds[index])

        return by_prompt(in_threads(complete, len(seeds), _SLOTS), params.num_samples)

    def _complete(self, prompt: str, params: SamplingParams, seed: int) -> SampledTokens:
        body = {
            "prompt": prompt,
            "n_predict": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": seed,
            "return_tokens": True,
            **_ONLY_TEMPERATURE_AND_TOP_P,
        }
        answer = self._server.post("/completion", body)
        tokens, truncated = answer["tokens"], answer["stop_type"] == "limit"
        if truncated and len(tokens) < params.max_tokens:
            raise RunError(
                f"llama.cpp stopped after {len(tokens)} of {params.max_tokens} tokens, because its context is full; "
                "pass a smaller --max-completion-tokens"
            )
        return SampledTokens(tokens, answer["content"], truncated)

    def close(self) -> None:
        """End the server."""
        self._server.close()


def load_sampler(file: GgufModel, rows: Sequence[Row], max_tokens: int) -> GgufSampler:
    """Start a server for the prompts of rows and completions of `max_tokens`. See `LlamaServer` for errors."""
    # A token has at least one byte.
    longest = max(sum(len(message["content"].encode()) for message in row["prompt"]) for row in rows)
    most = longest + _TEMPLATE_TOKENS + max_tokens
    server = LlamaServer(file.path, slots=_SLOTS, slot_tokens=min(most, file.context_tokens or most))
    return GgufSampler(file, server)
