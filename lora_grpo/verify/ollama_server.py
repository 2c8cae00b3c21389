"""Ollama. Sources: docs/api.md, api/types.go, server/routes.go and llm/llama_server.go of Ollama."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.verify.llama_cpp_server import weight_type
from lora_grpo.verify.openai_servers import changed_settings
from lora_grpo.verify.server_client import RefusedRequest, ServerClient, all_of
from lora_grpo.verify.targets import Answer, Messages, TargetFacts
from lora_grpo.verify.token_texts import TokenTexts

_NEUTRAL_OPTIONS: Mapping[str, float] = {
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "typical_p": 1,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
_DEFAULT_OPTIONS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""What Ollama uses for requests and models without options. Source: `DefaultOptions` in api/types.go."""


class OllamaServer:
    """A server of Ollama.

    It returns texts of tokens. Tokens that are parts of a character are missing in its list, so that completions with
    them cannot be told exactly.

    Args:
        name: how the user named the target.
        client: for its requests.
        model: its name on the server.
        tokenizer: the transformers tokenizer of the adapter.
    """

    def __init__(self, name: str, client: ServerClient, model: str, tokenizer: Any) -> None:
        self.name = name
        self._client = client
        self._model = model
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)

    def facts(self) -> TargetFacts:
        """Return what the server says about itself and the model, which it loads."""
        version = self._client.get("/api/version").get("version", "")
        shown = self._client.post("/api/show", {"model": self._model})
        self._client.post("/api/generate", {"model": self._model, "stream": False})
        running = self._client.get("/api/ps").get("models") or []
        context_tokens = None
        for entry in running:
            if self._model in (entry.get("name"), entry.get("model")):
                context_tokens = entry.get("context_length")

        options = {**_DEFAULT_OPTIONS, **_parameters(shown.get("parameters") or "")}
        neutral = {"temperature": (1.0,), **{name: (value,) for name, value in _NEUTRAL_OPTIONS.items()}}
        return TargetFacts(
            program=f"Ollama {version}".strip(),
            weight_type=weight_type((shown.get("details") or {}).get("quantization_level")),
            context_tokens=context_tokens,
            sampling_defaults=changed_settings(options, neutral),
        )

    def sample(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer | None]:
        """Return one completion of each prompt. See `Target.sample`. Older versions return no logprobs."""
        if not prompts:
            return []
        gives_logprobs = bool(self._generate(prompts[0], {"temperature": 0, "num_predict": 1}).get("logprobs"))

        def complete(index: int) -> Answer | None:
            options = {"temperature": 1 if gives_logprobs else 0, "num_predict": max_tokens, "seed": index + 1}
            answer = self._generate(prompts[index], options)
            return self._client.parsed("/api/generate", lambda: self._answer(answer, answer["response"]))

        return all_of(complete, range(len(prompts)))

    def _generate(self, prompt: list[int], options: Mapping[str, float]) -> dict[str, Any]:
        settings = self._settings({**options, "stop": []})
        return self._client.post(
            "/api/generate", {"prompt": self._texts.text_of_prompt(prompt), "raw": True, **settings}
        )

    def render(self, messages: Messages) -> list[int] | None:
        """Return the ids of a chat prompt. See `Target.render`. Older versions do not tell."""
        body = {"messages": [dict(message) for message in messages], "_debug_render_only": True}
        try:
            answer = self._client.post("/api/chat", {**body, **self._settings({"num_predict": 1})})
        except RefusedRequest:
            return None
        text = (answer.get("_debug_info") or {}).get("rendered_template")
        if text is None:
            return None
        bos = self._tokenizer.bos_token
        begins_with_bos = bool(bos) and text.startswith(bos)
        return list(self._tokenizer(text, add_special_tokens=not begins_with_bos)["input_ids"])

    def chat(self, prompts: Sequence[Messages], max_tokens: int) -> list[Answer | None] | None:
        """Return a greedy completion of each chat prompt. See `Target.chat`."""

        def complete(messages: Messages) -> Answer | None:
            options = {"temperature": 0, "num_predict": max_tokens}
            body = {"messages": [dict(message) for message in messages], **self._settings(options)}
            answer = self._client.post("/api/chat", body)
            return self._client.parsed("/api/chat", lambda: self._answer(answer, answer["message"]["content"]))

        return all_of(complete, prompts)

    def _settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that all requests have."""
        return {
            "model": self._model,
            "stream": False,
            "logprobs": True,
            "options": {**_NEUTRAL_OPTIONS, **options},
        }

    def _answer(self, answer: Mapping[str, Any], text: str) -> Answer | None:
        entries = answer.get("logprobs") or []
        pieces: list[str | bytes] = [
            bytes(entry["bytes"]) if entry.get("bytes") else entry["token"] for entry in entries
        ]
        if pieces:
            logprobs = [float(entry["logprob"]) for entry in entries]
            token_ids = self._texts.ids(pieces, text)
        else:
            logprobs = None
            token_ids = self._texts.ids_of_greedy(text, answer.get("eval_count"))
        if not token_ids:
            return None
        has_ended = answer["done_reason"] == "stop"
        return Answer(token_ids, logprobs, has_ended, answer.get("prompt_eval_count"))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _parameters(text: str) -> dict[str, float]:
    """Return the numbers of a model's parameters: lines of a name and a value."""
    numbers = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        try:
            numbers[name] = float(value)
        except ValueError:  # a text, such as a stop
            continue
    return numbers
