"""Servers with OpenAI's routes: vLLM, SGLang, `lora-grpo serve`, and any other.

The first three take and return token ids. Of the others, texts of tokens have to name the tokens.
Sources: OpenAI's reference; `entrypoints/openai/*/protocol.py` and `entrypoints/serve/tokenize/protocol.py` of vLLM
0.32; `srt/entrypoints/openai/protocol.py`, `serving_completions.py` and `http_server.py` of SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import json_files
from lora_grpo.verify.server_client import RefusedRequest, ServerClient, all_of
from lora_grpo.verify.targets import Answer, Messages, TargetFacts
from lora_grpo.verify.token_texts import TokenTexts

NEUTRAL_SETTINGS: Mapping[str, tuple[float, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
"""Settings with which tokens are sampled from the model's own distribution, and their values then."""
_MAX_END_CANDIDATES = 32
_FILLER = re.compile("reserved|unused|extra_id|placeholder", re.IGNORECASE)
"""In the names of special tokens that nothing uses."""


@dataclass(frozen=True)
class ModelCard:
    """An entry of `/v1/models`."""

    id: str
    owned_by: str
    parent: str | None = None
    """Of an adapter: the name of its base."""
    root: str | None = None
    context_tokens: int | None = None


class OpenAIServer:
    """A server with OpenAI's routes, of which no more is known.

    Args:
        name: how the user named the target.
        client: for its requests.
        card: the model.
        base: the card of its base, or `card` itself.
        tokenizer: the transformers tokenizer of the adapter.
    """

    takes_token_ids = False
    """Whether prompts may be token ids, and completions come with theirs."""
    asks_for_chat_logprobs = True
    """Whether chat completions are asked for logprobs, whose texts tell the tokens."""
    neutral_settings: Mapping[str, float] = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}
    """Sent with every request, so that no other settings of the server apply."""

    def __init__(self, name: str, client: ServerClient, card: ModelCard, base: ModelCard, tokenizer: Any) -> None:
        self.name = name
        self._client = client
        self._card = card
        self._base = base
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)

    @property
    def _model_fields(self) -> dict[str, str]:
        """The fields of a request that name the model."""
        return {"model": self._card.id}

    def facts(self) -> TargetFacts:
        """Return what the server says about itself."""
        return TargetFacts(program="an OpenAI-compatible server", context_tokens=self._base.context_tokens)

    # Completions

    def sample(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer | None]:
        """Return one completion of each prompt. See `Target.sample`."""
        answers: list[Answer | None] = []
        try:
            answers = self._completions(prompts, max_tokens, wants_logprobs=True)
        except RefusedRequest as error:
            if not error.has_route:
                return [None] * len(prompts)
            if error.is_temporary:
                raise
            # Perhaps it refuses only the logprobs.
        known = [answer for answer in answers if answer is not None]
        if not known or any(answer.logprobs is None for answer in known):
            answers = self._completions(prompts, max_tokens, wants_logprobs=False)
        return answers

    def _completions(
        self, prompts: Sequence[list[int]], max_tokens: int, *, wants_logprobs: bool
    ) -> list[Answer | None]:
        def complete(index: int) -> Answer | None:
            answer = self._complete(prompts[index], max_tokens, seed=index + 1, wants_logprobs=wants_logprobs)
            return self._client.parsed("/v1/completions", lambda: self._answer(answer, answer["choices"][0]["text"]))

        return all_of(complete, range(len(prompts)))

    def _complete(self, prompt: list[int], max_tokens: int, *, seed: int, wants_logprobs: bool) -> dict[str, Any]:
        body = {
            **self._model_fields,
            "prompt": prompt if self.takes_token_ids else self._texts.text_of_prompt(prompt),
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": 1 if wants_logprobs else 0,
            **self.neutral_settings,
        }
        if wants_logprobs:
            body["logprobs"] = 1
        if self.takes_token_ids:
            body["return_token_ids"] = True
        return self._client.post("/v1/completions", body)

    # Chat

    def render(self, messages: Messages) -> list[int] | None:
        """Return the ids of a chat prompt. See `Target.render`."""
        if not self.takes_token_ids:
            return None
        try:
            answer = self._chat(messages, 1, wants_logprobs=False)
        except RefusedRequest as error:
            if error.means_no_chat:
                return None
            raise
        choice = self._client.parsed("/v1/chat/completions", lambda: answer["choices"][0])
        prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
        return list(prompt_ids) if prompt_ids else None

    def chat(self, prompts: Sequence[Messages], max_tokens: int) -> list[Answer | None] | None:
        """Return a greedy completion of each chat prompt. See `Target.chat`."""
        if not prompts:
            return []
        # The first one tells what the server can do.
        wants_logprobs = self.asks_for_chat_logprobs
        try:
            try:
                self._chat(prompts[0], 1, wants_logprobs=wants_logprobs)
            except RefusedRequest:
                if not wants_logprobs:
                    raise
                wants_logprobs = False
                self._chat(prompts[0], 1, wants_logprobs=False)
        except RefusedRequest as error:
            if error.means_no_chat:
                return None
            raise

        def complete(messages: Messages) -> Answer | None:
            answer = self._chat(messages, max_tokens, wants_logprobs=wants_logprobs)
            return self._client.parsed(
                "/v1/chat/completions",
                lambda: self._answer(answer, answer["choices"][0]["message"]["content"] or ""),
            )

        return all_of(complete, prompts)

    def _chat(self, messages: Messages, max_tokens: int, *, wants_logprobs: bool) -> dict[str, Any]:
        body = {
            **self._model_fields,
            "messages": [dict(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": 0,
            **self.neutral_settings,
        }
        if wants_logprobs:
            body["logprobs"] = True
        if self.takes_token_ids:
            body["return_token_ids"] = True
        return self._client.post("/v1/chat/completions", body)

    # Answers

    def _answer(self, answer: Mapping[str, Any], text: str) -> Answer | None:
        """Return the first choice of an answer, or None if its tokens cannot be told exactly."""
        choice = answer["choices"][0]
        usage = answer.get("usage") or {}
        has_ended = choice["finish_reason"] in ("stop", "tool_calls")
        pieces, logprobs = read_logprobs(choice.get("logprobs"))
        token_ids = choice.get("token_ids")
        if token_ids is None and pieces:
            if pieces[-1] in ("", b"") and has_ended:  # an end token without a text
                pieces = pieces[:-1]
                logprobs = logprobs[:-1] if logprobs else None
            token_ids = self._texts.ids(pieces, text)
        elif token_ids is None:
            token_ids = self._texts.ids_of_greedy(text, usage.get("completion_tokens"))
        if not token_ids:
            return None
        if logprobs is not None and len(logprobs) != len(token_ids):
            # One of the lists may lack the end token.
            if not has_ended or abs(len(logprobs) - len(token_ids)) > 1:
                return None
            num_known = min(len(logprobs), len(token_ids))
            token_ids = token_ids[:num_known]
            logprobs = logprobs[:num_known]
        if logprobs and max(logprobs) > 1e-3:
            raise UserError(
                f"the server at {self._client.address} returns {max(logprobs):.3g} as a logprob, which is a logit; "
                "start it without --logprobs-mode"
            )
        return Answer(list(token_ids), logprobs, has_ended, usage.get("prompt_tokens"))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class LoraGrpoServer(OpenAIServer):
    """`lora-grpo serve`."""

    takes_token_ids = True
    asks_for_chat_logprobs = False

    def facts(self) -> TargetFacts:
        """Return what the server says about itself. Its requests sample at temperature 1 without settings."""
        return TargetFacts(program="lora-grpo serve")


class VllmServer(OpenAIServer):
    """A server of vLLM."""

    takes_token_ids = True
    asks_for_chat_logprobs = False
    neutral_settings: Mapping[str, float] = {
        **OpenAIServer.neutral_settings,
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1,
    }

    def facts(self) -> TargetFacts:
        """Return what the server says about itself, and the sampling defaults in the model's folder if it is here."""
        version = self._client.get("/version").get("version", "")
        return TargetFacts(
            program=f"vLLM {version}".strip(),
            context_tokens=self._base.context_tokens,
            end_token_ids=self._end_token_ids(),
            sampling_defaults=generation_defaults(self._base.root),
        )

    def _end_token_ids(self) -> tuple[int, ...]:
        """Return the special tokens after which the server samples no more, by making it sample each."""

        def ends_at(token_id: int) -> bool:
            body = {**self._model_fields, "prompt": [token_id], "max_tokens": 2, "allowed_token_ids": [token_id]}
            answer = self._client.post("/v1/completions", body)
            return self._client.parsed("/v1/completions", lambda: answer["choices"][0]["finish_reason"] == "stop")

        candidates = end_candidates(self._tokenizer)
        ends = all_of(ends_at, candidates)
        return tuple(token_id for token_id, is_end in zip(candidates, ends, strict=True) if is_end)


class SglangServer(OpenAIServer):
    """A server of SGLang. Versions without `return_token_ids` return texts of tokens."""

    takes_token_ids = True
    neutral_settings = VllmServer.neutral_settings

    @property
    def _model_fields(self) -> dict[str, str]:
        if not self._card.parent:
            return {"model": self._card.id}
        # With the name of an adapter as `model`, the base would answer, without an error.
        return {"model": self._card.parent, "lora_path": self._card.id}

    def facts(self) -> TargetFacts:
        """Return what the server says about itself, and the sampling defaults in the model's folder if it is here."""
        route = "/server_info"
        if not self._client.knows(route):  # of older versions
            route = "/get_server_info"
        info = self._client.get(route)
        dtype = info.get("dtype")
        return TargetFacts(
            program=f"SGLang {info.get('version', '')}".strip(),
            weight_type=info.get("quantization") or (None if dtype == "auto" else dtype),
            context_tokens=self._base.context_tokens,
            sampling_defaults=generation_defaults(self._base.root),
        )


def read_logprobs(logprobs: Any) -> tuple[list[str | bytes] | None, list[float] | None]:
    """Return the texts and logprobs of the tokens of a completion, in either form of OpenAI's. None if it has none.

    A completion of a text has lists: `tokens`, `token_logprobs`. A chat completion has a list of objects: `content`.
    """
    if not logprobs:
        return None, None
    pieces: list[str | bytes] = []
    if logprobs.get("content") is not None:
        for entry in logprobs["content"]:
            pieces.append(bytes(entry["bytes"]) if entry.get("bytes") else entry["token"])
        values = [entry["logprob"] for entry in logprobs["content"]]
    else:
        pieces += logprobs["tokens"]
        values = logprobs["token_logprobs"]
    if None in values:
        return pieces, None
    return pieces, [float(value) for value in values]


def generation_defaults(model_folder: str | None) -> dict[str, float]:
    """Return the settings of a model's generation_config.json that change what is sampled, if the folder is here.

    vLLM and SGLang use them for requests that do not have their own.
    """
    path = Path(model_folder or "") / "generation_config.json"
    if not model_folder or not path.is_file():
        return {}
    config = json_files.read_object(path)
    return changed_settings(config, NEUTRAL_SETTINGS)


def changed_settings(settings: Mapping[str, Any], neutral: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """Return the settings that have other values than neutral ones."""
    changed = {}
    for name, neutral_values in neutral.items():
        value = settings.get(name)
        if isinstance(value, int | float) and round(value, 6) not in neutral_values:
            changed[name] = round(value, 6)
    return changed


def end_candidates(tokenizer: Any) -> list[int]:
    """Return the special tokens that may end a completion, the tokenizer's own first."""
    special_ids = dict.fromkeys([tokenizer.eos_token_id, *tokenizer.all_special_ids])
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special and not _FILLER.search(token.content):
            special_ids[token_id] = None
    return [token_id for token_id in special_ids if token_id is not None][:_MAX_END_CANDIDATES]
