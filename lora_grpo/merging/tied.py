"""Tied embeddings: decide whether the head and embedding share one tensor, before and after the merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_grpo.files import same_values
from lora_grpo.merging.base_weights import Tensor
from lora_grpo.merging.outputs import Output

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
_HEADS = ("lm_head", "embed_out")


def embedding_and_head(base: Mapping[str, Tensor]) -> tuple[str | None, str]:
    """Return the weight names of the input embedding and the head. The first is None if its name is not recognized."""
    embeddings = [name for name in base if name.endswith(tuple(f"{module}.weight" for module in _EMBEDDINGS))]
    heads = [name for name in base if name in {f"{module}.weight" for module in _HEADS}]
    return min(embeddings, key=len, default=None), heads[0] if heads else f"{_HEADS[0]}.weight"


def is_tied(config: Mapping[str, Any], base: Mapping[str, Tensor], embedding: str | None, head: str) -> bool:
    """Return whether transformers (5.17) ties the head and embedding when it loads the base.

    A stored head with different values is not tied, regardless of the configuration.
    """
    if head not in base or embedding is None:
        return head not in base
    declared = config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings"))
    return bool(declared) and same_values(base[head], base[embedding])


def settle(outputs: dict[str, Output], embedding: str, head: str) -> bool | None:
    """Decide whether a tied head and embedding stay tied, and drop the head if they do.

    In the unmerged model, an update to one does not change the other. Trained tokens are the exception: PEFT ties them.

    Returns:
        False if they must be written as two tensors; None if the configuration does not change.
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
