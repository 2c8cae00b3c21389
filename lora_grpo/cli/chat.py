"""`lora-grpo chat`: ask a model questions, and watch the answers before and after training as they are generated."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from lora_grpo.cli.named_model import named_model
from lora_grpo.config import check_fields
from lora_grpo.files import printable
from lora_grpo.flags import Flag
from lora_grpo.models import ModelFlags, ModelSpec
from lora_grpo.prompts import chat, plain_text, template_variables, thoughts
from lora_grpo.runs import system_prompt
from lora_grpo.sampling import GgufModel, GgufSampler, Sampler, SamplingParams, build

_PROMPT_BYTES = 8192
"""Room for a question in the context of llama.cpp."""


@dataclass(frozen=True)
class ChatOptions(ModelFlags):
    """Flags of `lora-grpo chat`. The settings of a run are the defaults for its adapter."""

    source: Annotated[str, Flag("RUN|ADAPTER|MODEL|GGUF")]
    """Folder of a run, an adapter or a model, a Hub id, `starter`, or a GGUF file."""
    question: Annotated[str | None, Flag("QUESTION")] = None
    """Answer this question and exit; default: read questions from the terminal, one per line, until Ctrl-D."""
    system: str | None = None
    """The system prompt; default: the one of the run, if all of its rows had the same. Pass "" for none."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Sampling temperature; 0 means greedy."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the samples."""
    max_completion_tokens: PositiveInt | None = None
    """Maximum length of an answer in tokens; default: the run's value, else 512."""
    bits: Literal[4, 16] | None = None
    """Precision of the weights: 4 (NF4, as in training) or 16; default: the run's value, else 16."""


def run_chat(options: ChatOptions) -> None:
    """Answer one question, or every line of the terminal. With an adapter, its base model answers first.

    Every question is answered alone, as in training: the model does not see the questions before it.
    """
    check_fields(options)
    model = named_model(options.source, options, options.bits)
    run = model.run
    max_tokens = options.max_completion_tokens or 512
    if run and not options.max_completion_tokens:
        max_tokens = run["config"]["sampling"]["max_completion_tokens"]
    system = options.system
    if run and system is None:
        system = system_prompt(run)

    sampler = _sampler(model, system, max_tokens, options.seed)
    is_plain = plain_text.asks_in_plain_text(sampler.tokenizer, {})
    params = SamplingParams(1, options.temperature, 1.0, max_tokens, ends_at_next_question=is_plain)
    # The name before each answer, and whether the adapter is on, which a model without one ignores.
    adapter_of_answer = {model.label: True}
    if model.adapter:
        adapter_of_answer = {"base": False, model.label: True}
    questions = [options.question] if options.question else _questions()
    try:
        for question in questions:
            messages = [{"role": "user", "content": question}]
            if system:
                messages = [{"role": "system", "content": system}, *messages]
            prompt = chat.render(sampler.tokenizer, messages)
            for name, adapter in adapter_of_answer.items():
                print(f"{name}: {thoughts.begun(prompt)}", end="", flush=True)
                with sampler.awake(adapter=adapter):
                    for text in sampler.stream_text(prompt, params, options.seed):
                        print("\n".join(map(printable, text.split("\n"))), end="", flush=True)
                print()
    finally:
        sampler.close()


def _sampler(model: ModelSpec | GgufModel, system: str | None, max_tokens: int, seed: int) -> Sampler:
    """Load the model, with room for a question and an answer."""
    if isinstance(model, GgufModel):
        longest_prompt = [{"content": (system or "") + " " * _PROMPT_BYTES}]  # only its length matters
        return GgufSampler(model, [{"prompt": longest_prompt}], max_tokens)
    tokenizer = build.load_tokenizer(model)
    if model.run is None:  # the template of a run's model has the variables of its training
        template_variables.set_variables(tokenizer, {}, max_tokens)
    return build.load_sampler(model, "transformers", tokenizer, 0, seed)


def _questions() -> Iterator[str]:
    """Yield the lines that are typed or piped in."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - lets `input` edit the line and recall earlier ones

        print("Type a question. Ctrl-D ends.", file=sys.stderr)
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line
