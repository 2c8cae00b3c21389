"""llama.cpp's `llama-server`, also for a GGUF file that is a target itself.

Source: tools/server/README.md of llama.cpp, and the answers of its server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_grpo.verify.openai_servers import changed_settings
from lora_grpo.verify.server_client import RefusedRequest, ServerClient, all_of
from lora_grpo.verify.targets import IN_16_BITS, Answer, Messages, TargetFacts

_NEUTRAL_SETTINGS: Mapping[str, tuple[float, ...]] = {
    "temperature": (1,),
    "dynatemp_range": (0,),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    "repeat_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
}
_ONLY_TEMPERATURE = {"samplers": ["temperature"], "dynatemp_range": 0, "mirostat": 0}
"""Turns off all other samplers, also those that the server was started with."""


class LlamaCppServer:
    """A server of llama.cpp.

    Args:
        name: how the user named the target.
        client: for its requests.
        model: its name on the server.
        program: its version, if known. By default, the server tells.
        weight_type: of the file, if known.
        context_tokens: of the file, if known. By default, those of the server.
        engine_rounding: see `TargetFacts.engine_rounding`.
        on_close: called at the end.
    """

    def __init__(
        self,
        name: str,
        client: ServerClient,
        model: str,
        *,
        program: str | None = None,
        weight_type: str | None = None,
        context_tokens: int | None = None,
        engine_rounding: float = IN_16_BITS,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._client = client
        self._model = model
        self._program = program
        self._weight_type = weight_type
        self._context_tokens = context_tokens
        self._engine_rounding = engine_rounding
        self._on_close = on_close

    def facts(self) -> TargetFacts:
        """Return what the server says about itself and about its file."""
        properties = self._client.get("/props")
        settings = properties.get("default_generation_settings") or {}
        parameters = settings.get("params") or settings  # older versions have no `params`
        return TargetFacts(
            program=self._program or f"llama.cpp {properties.get('build_info', '')}".strip(),
            weight_type=self._weight_type or weight_type(properties.get("model_ftype")),
            engine_rounding=self._engine_rounding,
            context_tokens=self._context_tokens or settings.get("n_ctx"),
            end_token_ids=self._end_token_ids(),
            sampling_defaults=changed_settings(parameters, _NEUTRAL_SETTINGS),
            warnings=self._adapter_warnings(),
        )

    def _end_token_ids(self) -> tuple[int, ...] | None:
        """Return the tokens that end a completion: those that the server forbids if a request ignores them."""
        answer = self._post("/completion", {"prompt": "a", "n_predict": 1, "ignore_eos": True})
        biases = answer.get("generation_settings", {}).get("logit_bias")
        if biases is None:
            return None
        return tuple(bias["token"] for bias in biases if bias["bias"] is None)  # JSON has no -inf

    def _adapter_warnings(self) -> tuple[str, ...]:
        """Return what is wrong with the scales of the adapters that the server has loaded."""
        try:
            adapters = self._client.get_list("/lora-adapters")
        except RefusedRequest:
            return ()
        warnings = []
        for adapter in adapters:
            if adapter["scale"] != 1:
                warnings.append(
                    f"the adapter {adapter['path']} has scale {adapter['scale']:g} on the server; start it with --lora "
                    f'and without --lora-init-without-apply, or send [{{"id": {adapter["id"]}, "scale": 1}}] to '
                    "POST /lora-adapters"
                )
        return tuple(warnings)

    def sample(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer | None]:
        """Return one completion of each prompt. See `Target.sample`."""

        def complete(index: int) -> Answer | None:
            body = {
                "prompt": prompts[index],
                "n_predict": max_tokens,
                "seed": index + 1,
                "temperature": 1,
                "return_tokens": True,
                "n_probs": 1,
                **_ONLY_TEMPERATURE,
            }
            answer = self._post("/completion", body)
            return self._client.parsed("/completion", lambda: _completion(answer))

        return all_of(complete, range(len(prompts)))

    def render(self, messages: Messages) -> list[int] | None:
        """Return the ids of a chat prompt. See `Target.render`."""
        try:
            rendered = self._post("/apply-template", {"messages": [dict(message) for message in messages]})
        except RefusedRequest:
            return None
        text = self._client.parsed("/apply-template", lambda: rendered["prompt"])
        # The server adds the BOS token, as it does for a chat completion.
        answer = self._post("/tokenize", {"content": text, "add_special": True, "parse_special": True})
        return self._client.parsed("/tokenize", lambda: [int(token_id) for token_id in answer["tokens"]])

    def chat(self, prompts: Sequence[Messages], max_tokens: int) -> list[Answer | None] | None:
        """Return a greedy completion of each chat prompt. See `Target.chat`."""

        def complete(messages: Messages) -> Answer | None:
            body = {
                "messages": [dict(message) for message in messages],
                "max_tokens": max_tokens,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 1,
                **_ONLY_TEMPERATURE,
            }
            answer = self._post("/v1/chat/completions", body)
            return self._client.parsed("/v1/chat/completions", lambda: _chat_completion(answer))

        try:
            return all_of(complete, prompts)
        except RefusedRequest as error:
            if error.means_no_chat:
                return None
            raise

    def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post(route, {"model": self._model, **body})

    def close(self) -> None:
        """Close the connections, and end what was started."""
        self._client.close()
        self._on_close()


def weight_type(text: str | None) -> str | None:
    """Return llama.cpp's or Ollama's name of a weight type, such as `Q4_K - Medium`, in the form of `TargetFacts`."""
    if not text:
        return None
    name = re.sub(r" - (\w)\w*", r"_\1", text).removeprefix("all ").removeprefix("mostly ").upper()
    return name if name in ("F32", "F16", "BF16") else name.lower()


def _completion(answer: Mapping[str, Any]) -> Answer | None:
    """Return an answer of `/completion`, or None if not every token has a logprob, as at an incomplete character."""
    logprobs = [entry["logprob"] for entry in answer["completion_probabilities"]]
    token_ids = answer["tokens"]
    if len(logprobs) != len(token_ids):
        return None
    return Answer(token_ids, logprobs, answer["stop_type"] != "limit", answer.get("tokens_evaluated"))


def _chat_completion(answer: Mapping[str, Any]) -> Answer:
    """Return an answer of `/v1/chat/completions`."""
    [choice] = answer["choices"]
    entries = choice["logprobs"]["content"]
    token_ids = [entry["id"] for entry in entries]
    return Answer(token_ids, None, choice["finish_reason"] != "length", answer["usage"]["prompt_tokens"])
