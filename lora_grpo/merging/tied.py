"""Tied embeddings: whether a model's head is its embedding, before and after the merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_grpo.files import same_values
from lora_grpo.merging.base_weights import Tensor
from lora_grpo.merging.outputs import Output

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
_HEADS = ("lm_head", "embed_out")


def embedding_and_head(base: Mapping[str, Tensor]) -> tuple[str | None, str]:
    """Return the names of the input embedding's weight, if it has one of the usual names, and of the head's."""
    embeddings = [name for name in base if name.endswith(tuple(f"{module}.weight" for module in _EMBEDDINGS))]
    heads = [name for name in base if name in {f"{module}.weight" for module in _HEADS}]
    return min(embeddings, key=len, default=None), heads[0] if heads else f"{_HEADS[0]}.weight"


def is_tied(config: Mapping[str, Any], base: Mapping[str, Tensor], embedding: str | None, head: str) -> bool:
    """Return whether head and embedding are one tensor, as transformers (5.17) decides when it loads the base.

    A head that is stored with other values is not tied, whatever the configuration declares.
    """
    if head not in base or embedding is None:
        return head not in base
    declared = config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings"))
    return bool(declared) and same_values(base[head], base[embedding])


def settle(outputs: dict[str, Output], embedding: str, head: str) -> bool | None:
    """Decide whether a tied head and embedding stay one tensor, and drop the head if they do.

    In the unmerged model an update of one leaves the other alone, except for trained tokens: PEFT ties those.

    Returns:
        False if they must be written as two tensors; None if the configuration stays as it is.
    """
    below = outputs[embedding]
    if head not in outputs:
        only_tokens = below.tokens is not None and below.low_rank is None and below.replacement is None
        if not below.changed or only_tokens:
            return None
        outputs[head] = Output(head, below.base)
    if same_values(below, outputs[head]):
        del outputs[head]
        return None
    return False
