"""The tokenizer of a resolved model, with the chat template of its training and the tokens that end its completions."""

from typing import Any

from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError
from lora_grpo.models import base_model, stop_tokens
from lora_grpo.models.target import ModelSpec
from lora_grpo.prompts import chat


def tokenizer_of(spec: ModelSpec) -> Any:
    """Load the tokenizer of a model with the chat template that it was trained with. Raises UserError if it cannot."""
    settings = ModelConfig(name=str(spec.tokenizer), trust_remote_code=spec.base.trust_remote_code)
    tokenizer = base_model.load_tokenizer(settings)
    if spec.chat_templates:
        templates = dict(spec.chat_templates)
        has_only_default = list(templates) == ["default"]
        tokenizer.chat_template = templates["default"] if has_only_default else templates
    return tokenizer


def completion_ends(spec: ModelSpec, tokenizer: Any) -> list[int]:
    """Return the ids of all tokens that end a completion of a model, and set the tokenizer's padding token if needed.

    Training here ends completions with the tokens of `stop_tokens.eos_token_ids` and no others. An adapter from
    elsewhere may have been trained to end with the last token of the chat template, even if neither its tokenizer nor
    its base declares that token: fine-tuned base models often have such settings.

    Raises:
        UserError: the base's generation config cannot be read, or declares what is not the id of a token.
        RunError: no token ends a completion.
    """
    ids = stop_tokens.declared_ends(spec.base, tokenizer, spec.base_name)
    if spec.adapter and spec.run is None:
        last = _last_special_token(tokenizer)
        if last is not None:
            ids = sorted({*ids, last})
    return stop_tokens.require_ends(ids, tokenizer, spec.base_name)


def _last_special_token(tokenizer: Any) -> int | None:
    """Return the special token right after the last answer of a conversation in the chat template; None without one.

    In a conversation that goes on, another token may follow an answer: in gpt-oss, `<|end|>` also follows thoughts.
    """
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\0"}]
    try:
        text = chat.render_example(tokenizer, messages, add_generation_prompt=False)
    except UserError:  # a template that renders no answers ends none
        return None
    tail = text.partition("\0")[2]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return next((token_id for token_id in ids if token_id in special), None)
