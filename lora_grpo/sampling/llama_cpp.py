"""Sample a GGUF file with llama.cpp, and render its prompts with its own template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_grpo.errors import RunError
from lora_grpo.grading import Row
from lora_grpo.prompts import thoughts
from lora_grpo.sampling.gguf_model import GgufModel
from lora_grpo.sampling.llama_server import LlamaServer
from lora_grpo.sampling.requests import Request, RequestQueue, serve_in_threads
from lora_grpo.sampling.sampler import Sampler
from lora_grpo.sampling.samples import Prompts, SampledTokens, SamplingParams, end_early
from lora_grpo.sampling.streams import by_prompt, in_threads

_SLOTS = 8
"""Number of completions that are decoded at once."""
_TEMPLATE_TOKENS = 1024
"""More tokens than any chat template adds to the messages and tools of a row."""
_ONLY_TEMPERATURE_AND_TOP_P = {"samplers": ["temperature", "top_p"], "mirostat": 0}
"""Turns off all other samplers of llama.cpp: penalties, DRY, XTC, top-k, min-p, typical-p, and what a GGUF's metadata
set. The temperature comes first, as in `token_selection.select_tokens`. By default, llama.cpp applies top-p first."""


class GgufTokenizer:
    """The part of a transformers tokenizer that `lora_grpo.prompts.chat` uses, on the tokenizer in a GGUF file."""

    def __init__(self, server: LlamaServer, chat_template: str | None) -> None:
        self._server = server
        self.chat_template = chat_template
        self._rendered: dict[str, str] = {}
        """The prompts of earlier requests, by their bodies."""

    def get_chat_template(self) -> str | None:
        return self.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        **variables: Any,
    ) -> str:
        """Return the prompt of messages, without the BOS token that the server adds itself."""
        assert not tokenize and add_generation_prompt
        body: dict[str, Any] = {"messages": list(messages), "chat_template_kwargs": variables}
        if tools:
            body["tools"] = list(tools)
        key = json.dumps(body)
        if key not in self._rendered:
            self._rendered[key] = str(self._server.post("/apply-template", body)["prompt"])
        return self._rendered[key]

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        token_ids = []
        for text in texts:
            body = {"content": text, "add_special": add_special_tokens, "parse_special": True}
            token_ids.append(self._server.post("/tokenize", body)["tokens"])
        return {"input_ids": token_ids}

    def batch_decode(self, batch: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [self.decode(ids) for ids in batch]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return str(self._server.post("/detokenize", {"tokens": list(ids)})["content"])


class GgufSampler(Sampler):
    """Samples with a llama.cpp server of its own, which ends with this object and with this process.

    The random numbers of a completion depend only on its seed. They are not those of the other samplers, and logits may
    differ by rounding, depending on what else is decoded. The server has space for the prompts of `rows` with
    completions of `max_tokens`. UserError if llama.cpp cannot load the file.
    """

    serves_training = False
    streams = True
    adds_bos = True

    def __init__(self, model: GgufModel, rows: Sequence[Row], max_tokens: int) -> None:
        longest_prompt = max(_most_prompt_tokens(row) for row in rows)
        slot_tokens = longest_prompt + _TEMPLATE_TOKENS + max_tokens
        if model.context_tokens:
            slot_tokens = min(slot_tokens, model.context_tokens)
        self._server = LlamaServer(model.path, slots=_SLOTS, slot_tokens=slot_tokens)
        self._kept_tokens = thoughts.marker_tokens(model.chat_template or "")
        super().__init__(None, GgufTokenizer(self._server, model.chat_template), ())

    def describe(self) -> dict[str, Any]:
        """Describe how completions are sampled, for the report."""
        return {"engine": f"llama.cpp {self._server.version}"}

    def stream(
        self, prompts: Prompts, params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[SampledTokens]]]:
        """Return an iterator over (index of the prompt, its completions). See `Sampler.stream`."""

        def complete(index: int) -> SampledTokens:
            prompt = prompts[index // params.num_samples]
            return self._complete(prompt, params, params.token_limit(index), seeds[index])

        return by_prompt(in_threads(complete, len(seeds), _SLOTS), params.num_samples)

    def _serve(self, queue: RequestQueue) -> None:
        """Sample requests as they come, each in a thread of its own."""

        def complete(request: Request) -> SampledTokens:
            return self._complete(request.prompt_ids, request.params, request.max_tokens, request.seed)

        serve_in_threads(queue, complete, _SLOTS)

    def _complete(self, prompt: str | list[int], params: SamplingParams, limit: int, seed: int) -> SampledTokens:
        """Return one completion of at most `limit` tokens."""
        body = {
            "prompt": prompt,
            "n_predict": limit,
            "seed": seed,
            "return_tokens": True,
            "temperature": params.temperature,
            "top_p": params.top_p,
            **_ONLY_TEMPERATURE_AND_TOP_P,
            "preserved_tokens": self._kept_tokens,  # llama.cpp's text has no special tokens but these
        }
        answer = self._server.post("/completion", body)
        token_ids = answer["tokens"]
        truncated = answer["stop_type"] == "limit"
        if truncated and len(token_ids) < limit:
            raise RunError("the context of llama.cpp is full; pass a smaller --max-completion-tokens")
        sample = SampledTokens(token_ids, answer["content"], truncated)
        return end_early(self.tokenizer, sample, params)

    def close(self) -> None:
        """End the server."""
        self._server.close()


def _most_prompt_tokens(row: Row) -> int:
    """Return a number of tokens that the prompt of a row does not exceed, apart from what the template adds to it."""
    # A token has at least one byte.
    messages = json.dumps(row["prompt"], ensure_ascii=False)
    tools = json.dumps(row.get("tools") or [], ensure_ascii=False)
    num_bytes = len(messages.encode(errors="replace")) + len(tools.encode(errors="replace"))
    agent_tokens: int = row.get("prompt_tokens", 0)  # an agent makes its own prompts
    return max(num_bytes, agent_tokens)
