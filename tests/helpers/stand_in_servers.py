"""Stand-ins for servers that cannot be installed here, in which the starter model answers.

OllamaStandIn follows docs/api.md, api/types.go and llm/llama_server.go of Ollama; SglangStandIn follows
`srt/entrypoints/openai/protocol.py` and `http_server.py` of SGLang. OpenAIStandIn is any other server.
"""

import asyncio
import contextlib
import json

import torch
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from lora_grpo.endpoint import listen, serving_in_thread


class Model:
    """A transformers model that samples one completion at a time."""

    def __init__(self, model, tokenizer):
        self.model = model
        self.tokenizer = tokenizer

    def complete(self, prompt_ids, max_tokens, temperature, seed):
        """Return token ids and logprobs of a completion; the last id is the end token if it has ended."""
        generator = torch.Generator().manual_seed(seed)
        token_ids = []
        logprobs = []
        while len(token_ids) < max_tokens and self.tokenizer.eos_token_id not in token_ids:
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt_ids + token_ids])).logits[0, -1]
            distribution = logits.float().log_softmax(-1)
            if temperature == 0:
                token_id = int(distribution.argmax())
            else:
                token_id = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            token_ids.append(token_id)
            logprobs.append(float(distribution[token_id]))
        return token_ids, logprobs

    def render(self, messages):
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def encode(self, text):
        return self.tokenizer(text)["input_ids"]

    def has_ended(self, token_ids):
        return self.tokenizer.eos_token_id in token_ids

    def text(self, token_ids):
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def piece(self, token_id):
        return self.tokenizer.decode([token_id])


class StandIn:
    """A server. In subclasses, `routes` maps a path to the name of a method, which returns the answer to a body."""

    key = None
    """The key that requests must have."""

    def __init__(self, **models):
        self.models = models
        self.bodies = []
        """The bodies of all requests."""

    @contextlib.contextmanager
    def served(self):
        """Serve, and yield the address."""

        async def answer(request):
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": {"message": "Invalid API key"}}, 401)
            content = await request.body()
            body = json.loads(content) if content else {}
            self.bodies.append((request.url.path, body))
            try:
                result = await asyncio.to_thread(getattr(self, self.routes[request.url.path]), body)
            except ValueError as error:
                return JSONResponse({"error": {"message": str(error)}}, 400)
            return PlainTextResponse(result) if isinstance(result, str) else JSONResponse(result)

        routes = [Route(path, answer, methods=["GET", "POST"]) for path in self.routes]
        with serving_in_thread(Starlette(routes=routes), listen()) as address:
            yield address


class OpenAIStandIn(StandIn):
    """A server that takes and returns texts."""

    owned_by = "someone"
    gives_logprobs = True

    @property
    def routes(self):
        return {
            "/v1/models": "list_models",
            "/v1/completions": "complete",
            "/v1/chat/completions": "chat",
        }

    def list_models(self, body):
        entries = [{"id": name, "object": "model", "owned_by": self.owned_by} for name in self.models]
        return {"object": "list", "data": entries}

    def complete(self, body):
        model = self.models[body["model"]]
        if body.get("logprobs") is not None and not self.gives_logprobs:
            raise ValueError("logprobs are not supported")
        prompt_ids = body["prompt"] if isinstance(body["prompt"], list) else model.encode(body["prompt"])
        token_ids, logprobs = model.complete(prompt_ids, body["max_tokens"], body["temperature"], body.get("seed", 0))
        listed = None
        if body.get("logprobs") is not None:
            listed = {"tokens": [model.piece(token_id) for token_id in token_ids], "token_logprobs": logprobs}
        choice = {"text": model.text(token_ids), "logprobs": listed, **self.ending(model, token_ids)}
        return self.answered(choice, prompt_ids, token_ids, body)

    def chat(self, body):
        model = self.models[body["model"]]
        if body.get("logprobs") and not self.gives_logprobs:
            raise ValueError("logprobs are not supported")
        prompt_ids = model.encode(model.render(body["messages"]))
        token_ids, logprobs = model.complete(prompt_ids, body["max_tokens"], body["temperature"], 0)
        listed = None
        if body.get("logprobs"):
            entries = []
            for token_id, logprob in zip(token_ids, logprobs, strict=True):
                entries.append({"token": model.piece(token_id), "bytes": None, "logprob": logprob})
            listed = {"content": entries}
        message = {"role": "assistant", "content": model.text(token_ids)}
        choice = {"message": message, "logprobs": listed, **self.ending(model, token_ids)}
        return self.answered(choice, prompt_ids, token_ids, body)

    def ending(self, model, token_ids):
        return {"index": 0, "finish_reason": "stop" if model.has_ended(token_ids) else "length"}

    def answered(self, choice, prompt_ids, token_ids, body):
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(token_ids)}
        return {"choices": [choice], "usage": usage}


class ChatOnlyStandIn(OpenAIStandIn):
    """A server without completions of texts."""

    @property
    def routes(self):
        return {"/v1/models": "list_models", "/v1/chat/completions": "chat"}


class SglangStandIn(OpenAIStandIn):
    """SGLang with a base and an adapter: of `model`, only `BASE:ADAPTER` and `lora_path` select the adapter."""

    owned_by = "sglang"
    returns_token_ids = True

    @property
    def routes(self):
        return {**super().routes, "/server_info": "server_info"}

    def list_models(self, body):
        base = {"id": "base", "owned_by": "sglang", "root": "base", "parent": None, "max_model_len": 1024}
        adapter = {"id": "tuned", "owned_by": "sglang", "root": "/adapter", "parent": "base", "max_model_len": None}
        return {"object": "list", "data": [base, adapter]}

    def server_info(self, body):
        return {"version": "0.5.6", "dtype": "bfloat16", "quantization": None}

    def select(self, body):
        adapter = body.get("lora_path") or body["model"].partition(":")[2]
        return {**body, "model": adapter or "base"}

    def complete(self, body):
        return super().complete(self.select(body))

    def chat(self, body):
        return super().chat(self.select(body))

    def answered(self, choice, prompt_ids, token_ids, body):
        if self.returns_token_ids and body.get("return_token_ids"):
            choice = {**choice, "token_ids": token_ids, "prompt_token_ids": prompt_ids}
        return super().answered(choice, prompt_ids, token_ids, body)


class OllamaStandIn(StandIn):
    """Ollama with one model. It hides the end token, and leaves incomplete characters out of its logprobs."""

    gives_logprobs = True
    tells_rendering = True

    @property
    def routes(self):
        return {
            "/v1/models": "list_models",
            "/api/version": "version",
            "/api/show": "show",
            "/api/ps": "running",
            "/api/generate": "generate",
            "/api/chat": "chat",
        }

    def list_models(self, body):
        return {"object": "list", "data": [{"id": f"{name}:latest", "owned_by": "library"} for name in self.models]}

    def version(self, body):
        return {"version": "0.18.0"}

    def show(self, body):
        parameters = 'stop                           "<|im_end|>"\ntemperature                    0.7\ntop_k          0'
        return {"parameters": parameters, "details": {"quantization_level": "Q4_K_M"}, "model_info": {}}

    def running(self, body):
        return {"models": [{"name": f"{name}:latest", "context_length": 2048} for name in self.models]}

    def generate(self, body):
        if not body.get("prompt"):  # loads the model
            return {"response": "", "done": True, "done_reason": "load"}
        assert body["raw"] and not body["stream"]
        return self.answered(body, self.model_of(body).encode(body["prompt"]), lambda text: {"response": text})

    def chat(self, body):
        prompt = self.model_of(body).render(body["messages"])
        if body.get("_debug_render_only") and self.tells_rendering:
            return {"message": {}, "done": False, "_debug_info": {"rendered_template": prompt}}
        return self.answered(body, self.model_of(body).encode(prompt), lambda text: {"message": {"content": text}})

    def model_of(self, body):
        return self.models[body["model"].removesuffix(":latest")]

    def answered(self, body, prompt_ids, content_of):
        model = self.model_of(body)
        options = body["options"]
        neutral = {"top_k": 0, "top_p": 1, "min_p": 0, "repeat_penalty": 1, "presence_penalty": 0}
        assert neutral.items() <= options.items()
        token_ids, logprobs = model.complete(
            prompt_ids, options["num_predict"], options["temperature"], options.get("seed", 0)
        )
        entries = []
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            piece = model.piece(token_id)
            if "\N{REPLACEMENT CHARACTER}" not in piece and token_id != model.tokenizer.eos_token_id:
                entries.append({"token": piece, "logprob": logprob})
        answer = {
            **content_of(model.text(token_ids)),
            "done": True,
            "done_reason": "stop" if model.has_ended(token_ids) else "length",
            "prompt_eval_count": len(prompt_ids),
            "eval_count": len(token_ids),
        }
        if body.get("logprobs") and self.gives_logprobs:
            answer["logprobs"] = entries
        return answer
