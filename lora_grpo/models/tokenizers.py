"""The tokenizer of a resolved model, with the chat template of its training and the tokens that end its completions."""

from typing import Any

from lora_grpo.config import ModelConfig
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
        last_token = chat.end_of_turn(tokenizer, add_generation_prompt=False)
        if last_token:
            ids = sorted({*ids, tokenizer.convert_tokens_to_ids(last_token)})
    return stop_tokens.require_ends(ids, tokenizer, spec.base_name)
