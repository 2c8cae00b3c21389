"""Servers and GGUF files as targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.hardware import nvidia_gpus
from lora_grpo.sampling import LlamaServer, read_gguf
from lora_grpo.verify.llama_cpp_server import LlamaCppServer, weight_type
from lora_grpo.verify.ollama_server import OllamaServer
from lora_grpo.verify.openai_servers import LoraGrpoServer, ModelCard, OpenAIServer, SglangServer, VllmServer
from lora_grpo.verify.server_client import ServerClient
from lora_grpo.verify.targets import IN_16_BITS, WITH_16_BIT_CACHE, Target

REQUEST_SECONDS = 300.0
_GGUF_SLOTS = 8
_OPENAI_SERVERS = {"vllm": VllmServer, "sglang": SglangServer, "lora_grpo": LoraGrpoServer}
"""By `owned_by` of the models."""


def open_server(url: str, model: str | None, tokenizer: Any, *, seconds: float = REQUEST_SECONDS) -> Target:
    """Return the target at the address of a server.

    What runs there is told by `owned_by` of its models, and Ollama by its own route for the version.

    Args:
        url: such as `http://127.0.0.1:8000`, with or without `/v1`.
        model: the name of the model there. None is the only one.
        tokenizer: the transformers tokenizer of the adapter.
        seconds: time limit of a request.

    Raises:
        UserError: there is no such server, or no such model there.
    """
    address = url.rstrip("/").removesuffix("/v1")
    client = ServerClient(address, seconds)
    try:
        cards = _model_cards(client)
        card = _chosen(cards, model, address)
        base = next((other for other in cards if other.id == card.parent), card)
        name = f"{url}#{model}" if model else url

        if card.owned_by == "llamacpp":
            return LlamaCppServer(name, client, card.id)
        if card.owned_by not in _OPENAI_SERVERS and client.knows("/api/version"):
            return OllamaServer(name, client, card.id, tokenizer)
        kind = _OPENAI_SERVERS.get(card.owned_by, OpenAIServer)
        return kind(name, client, card, base, tokenizer)
    except BaseException:
        client.close()
        raise


def open_gguf(path: Path, context_tokens: int) -> Target:
    """Return the target in a GGUF file, run by llama.cpp.

    Args:
        path: the file.
        context_tokens: maximum length of a prompt and its completion.

    Raises:
        UserError: the file is damaged, or llama.cpp is not installed or cannot load it.
    """
    model = read_gguf(path)
    server = LlamaServer(path, slots=_GGUF_SLOTS, slot_tokens=context_tokens)
    return LlamaCppServer(
        str(path),
        ServerClient(server.address, REQUEST_SECONDS),
        str(path),
        program=f"llama.cpp {server.version}",
        weight_type=weight_type(model.label),
        context_tokens=model.context_tokens,
        engine_rounding=IN_16_BITS if nvidia_gpus()[0] else WITH_16_BIT_CACHE,
        on_close=server.close,
    )


def _model_cards(client: ServerClient) -> list[ModelCard]:
    """Return the models of a server."""
    answer = client.get("/v1/models")

    def parse() -> list[ModelCard]:
        cards = []
        for entry in answer["data"] or []:
            cards.append(
                ModelCard(
                    id=str(entry["id"]),
                    owned_by=str(entry.get("owned_by", "")),
                    parent=entry.get("parent"),
                    root=entry.get("root"),
                    context_tokens=entry.get("max_model_len"),
                )
            )
        return cards

    return client.parsed("/v1/models", parse)


def _chosen(cards: list[ModelCard], model: str | None, address: str) -> ModelCard:
    """Return the card of a model, or raise a UserError that lists the names."""
    names = ", ".join(card.id for card in cards)
    if not cards:
        raise UserError(f"the server at {address} has no model; load one")
    if model is None and len(cards) > 1:
        raise UserError(f"the server at {address} has several models ({names}); write {address}#NAME")
    for card in cards:
        # Ollama adds `:latest`, and SGLang's name of an adapter is `BASE:ADAPTER`.
        if model in (None, card.id, card.id.removesuffix(":latest"), f"{card.parent}:{card.id}"):
            return card
    raise UserError(f"the server at {address} has no model {model!r:.100}; write {address}#NAME with one of {names}")
