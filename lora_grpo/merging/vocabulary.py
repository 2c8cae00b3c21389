"""Check that the merged model has an embedding of every token that its tokenizer produces."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError
from lora_grpo.merging.mapping import SAVE_EMBEDDINGS
from lora_grpo.models import ModelSpec, base_model


def check_vocabulary(target: ModelSpec, vocab_size: int) -> None:
    """Check the tokenizer of an adapter against the number of rows in the merged model's embedding.

    A tokenizer of the base may be larger than its embedding: Gemma 3's has a token for images, and its text models have
    no embedding of it.

    Raises:
        UserError: the adapter's tokenizer has tokens without an embedding that the base's does not have.
    """
    if target.tokenizer != target.adapter or (tokens := _num_tokens(target.tokenizer, target)) <= vocab_size:
        return
    of_base = 0
    with contextlib.suppress(UserError):  # the base may have no tokenizer
        of_base = _num_tokens(Path(target.base.name), target)
    if tokens > of_base:
        raise UserError(
            f"the tokenizer in {target.tokenizer} has {tokens} tokens, and the merged model has embeddings of "
            f"{vocab_size}; {SAVE_EMBEDDINGS}, or delete the tokenizer's files to merge with the base's tokenizer"
        )


def _num_tokens(folder: Path, target: ModelSpec) -> int:
    """Return the number of ids up to the largest one of a tokenizer."""
    settings = ModelConfig(name=str(folder), trust_remote_code=target.base.trust_remote_code)
    return max(base_model.load_tokenizer(settings).get_vocab().values()) + 1
