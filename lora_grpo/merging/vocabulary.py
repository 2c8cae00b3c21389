"""Check that the merged model has an embedding of every token that its tokenizer produces."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError
from lora_grpo.merging.mapping import SAVE_EMBEDDINGS
from lora_grpo.models import ModelSpec, base_model


def check_vocabulary(target: ModelSpec, vocab_size: int) -> None:
    """Raise a UserError if the adapter's tokenizer has tokens that neither the merged model nor the base has.

    A tokenizer of the base may be larger than its embedding: Gemma 3's has a token for images, and its text models have
    no embedding of it.
    """

    def num_tokens(folder: Path) -> int:
        settings = ModelConfig(name=str(folder), trust_remote_code=target.base.trust_remote_code)
        return max(base_model.load_tokenizer(settings).get_vocab().values()) + 1

    if target.tokenizer != target.adapter or (tokens := num_tokens(target.tokenizer)) <= vocab_size:
        return
    of_base = 0
    with contextlib.suppress(UserError):  # the base may have no tokenizer
        of_base = num_tokens(Path(target.base.name))
    if tokens > of_base:
        raise UserError(
            f"the tokenizer in {target.tokenizer} has {tokens} tokens, and the merged model has embeddings of "
            f"{vocab_size}; {SAVE_EMBEDDINGS}, or delete the tokenizer's files to merge with the base's tokenizer"
        )
