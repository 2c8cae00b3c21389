"""`lora-grpo serve`: an OpenAI-compatible endpoint for people and harnesses, after and before training."""

import ipaddress
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from lora_grpo import console
from lora_grpo.cli.named_model import named_model
from lora_grpo.config import Backend, check_fields
from lora_grpo.endpoint import Policy, ServedModels, listen, make_app, names_of_server, serving_in_thread
from lora_grpo.errors import UserError
from lora_grpo.flags import Flag
from lora_grpo.models import BASE, ModelFlags, ModelSpec
from lora_grpo.prompts import template_variables
from lora_grpo.runs import system_prompt
from lora_grpo.sampling import GgufModel, GgufSampler, RequestQueue, Sampler, build

_ADAPTER = "adapter"
"""Name of the model with the adapter, if its folder has the name of the other one, `base`."""
_CONTEXT_TOKENS = 4096
"""The default of `--context-tokens`."""


@dataclass(frozen=True)
class ServeOptions(ModelFlags):
    """Flags of `lora-grpo serve`."""

    source: Annotated[str, Flag("RUN|ADAPTER|MODEL|GGUF")]
    """Folder of a run, an adapter or a model, a Hub id, `starter`, or a GGUF file."""
    host: str = "127.0.0.1"
    """Address to listen on. There is no password, so anyone who can reach another address can use the model. On this
    one, requests must name 127.0.0.1 or localhost; a proxy with another name needs `--host 0.0.0.0`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 selects a free one."""
    context_tokens: PositiveInt | None = None
    """Maximum length of a prompt plus its answer in tokens; default: 4096, or the model's context if that is less."""
    backend: Backend = "auto"
    """Sampling engine. `auto`: vLLM if it is installed and a GPU is available, else transformers."""
    bits: Literal[4, 16] | None = None
    """Precision of the weights: 4 (NF4, as in training) or 16; default: the run's value, else 16."""
    chat_template_kwargs: Annotated[tuple[str, ...], Flag(template_variables.KWARGS_FLAG)] = ()
    """Variables of the chat template of a model without a run, as KEY=VALUE, e.g. enable_thinking=false."""


def run_serve(options: ServeOptions) -> None:
    """Serve a model, and the base of its adapter, until Ctrl-C or SIGTERM."""
    check_fields(options)
    model = named_model(options.source, options, options.bits)
    if isinstance(model, GgufModel) and options.backend != "auto":
        raise UserError("--backend does not apply to a GGUF file; omit it")
    if model.run and options.chat_template_kwargs:
        raise UserError(
            f"{template_variables.KWARGS_FLAG} is for models without a run; leave it out to use those of its training"
        )
    context_tokens = _context_tokens(options, model)

    # The port is taken before the model is loaded, which may take minutes.
    with listen(options.host, options.port) as listener:
        address = ipaddress.ip_address(listener.getsockname()[0])
        if not address.is_loopback:
            console.note(f"warning: there is no password; anyone who can reach {address} can use the model")
        sampler = _load(model, options, context_tokens)
        try:
            _serve(sampler, model, _names(options, model), context_tokens, listener)
        finally:
            sampler.close()


def _serve(
    sampler: Sampler,
    model: ModelSpec | GgufModel,
    adapter_of_model: dict[str, bool],
    context_tokens: int,
    listener: socket.socket,
) -> None:
    """Answer requests in another thread, and sample for them in this one."""
    queue = RequestQueue()
    policy = Policy(sampler.tokenizer, sampler.eos_token_ids, sampler.encode, queue)
    served = ServedModels(policy, adapter_of_model, context_tokens)
    app = make_app(served.at, list(adapter_of_model), names_of_server(listener))
    with sampler.awake(adapter=True), serving_in_thread(app, listener) as address:
        half_of_context = context_tokens // 2
        sampler.fit_batch([[0] * half_of_context], context_tokens - half_of_context)
        training_prompt = system_prompt(model.run) if model.run else None
        if training_prompt:
            console.note(f"system prompt of the training, for clients to send: {json.dumps(training_prompt)}")
        console.result(f"serving {' and '.join(adapter_of_model)} at {address}/v1; Ctrl-C ends")
        sampler.serve(queue)


def _names(options: ServeOptions, model: ModelSpec | GgufModel) -> dict[str, bool]:
    """Return the names of the models, and whether each is sampled with the adapter."""
    path = Path(options.source).expanduser().resolve()
    name = path.stem if isinstance(model, GgufModel) else path.name
    if model.adapter:
        return {_ADAPTER if name == BASE else name: True, BASE: False}
    return {name: True}


def _context_tokens(options: ServeOptions, model: ModelSpec | GgufModel) -> int:
    """Return the maximum length of a prompt plus its answer, or raise a UserError if the model's context is shorter."""
    if model.context_tokens is None:
        return options.context_tokens or _CONTEXT_TOKENS
    if options.context_tokens and options.context_tokens > model.context_tokens:
        raise UserError(
            f"--context-tokens {options.context_tokens} exceeds the {model.context_tokens} that {model.base_name} "
            "takes; pass a smaller one"
        )
    return min(options.context_tokens or _CONTEXT_TOKENS, model.context_tokens)


def _load(model: ModelSpec | GgufModel, options: ServeOptions, context_tokens: int) -> Sampler:
    """Load the model, with the chat template of its training."""
    variables = template_variables.parse_kwargs(options.chat_template_kwargs)
    if isinstance(model, GgufModel):
        empty_prompt = [{"content": ""}]
        gguf_sampler = GgufSampler(model, [{"prompt": empty_prompt}], context_tokens)
        if model.run is None:  # the template of a run's model has the variables of its training
            template_variables.set_variables(gguf_sampler.tokenizer, variables, context_tokens)
        return gguf_sampler
    backend = build.choose_backend(options.backend)
    tokenizer = build.load_tokenizer(model)
    if model.run is None:
        template_variables.set_variables(tokenizer, variables, context_tokens)
    return build.load_sampler(model, backend, tokenizer, context_tokens, seed=0)
