"""Whether a model's head still is its embedding once an adapter is merged, and how large its vocabulary is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import row_blocks
from lora_grpo.merging.delta import Output, Tensor

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
_HEADS = ("lm_head", "embed_out")


def embedding_and_head(base: Mapping[str, Tensor]) -> tuple[str | None, str]:
    """Return the names of the input embedding's weight, where one is known by its name, and of the head's."""
    named = [name for name in base if name.endswith(tuple(f"{module}.weight" for module in _EMBEDDINGS))]
    heads = [name for name in base if name in {f"{module}.weight" for module in _HEADS}]
    return min(named, key=len, default=None), heads[0] if heads else f"{_HEADS[0]}.weight"


def is_tied(config: Mapping[str, Any], base: Mapping[str, Tensor], embedding: str | None, head: str) -> bool:
    """Whether head and embedding are one tensor, as transformers (5.17) decides when it loads the base.

    A head that is stored and differs is a tensor of its own, whatever the configuration says.
    """
    if head not in base or embedding is None:
        return head not in base
    said = config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings"))
    return bool(said) and is_same(base[head], base[embedding])


def settle(outputs: dict[str, Output], embedding: str, head: str) -> bool | None:
    """Find out whether a tied head and embedding still are one tensor; where they are, only the embedding is kept.

    In the live model an update of one of them leaves the other alone, but for trained tokens: PEFT ties those.

    Returns:
        False where they have to be written apart; None where nothing changes.
    """
    below, above = outputs[embedding], outputs.get(head)
    if above is None:
        only_tokens = below.tokens is not None and below.low_rank is None and below.replacement is None
        if not below.changed or only_tokens:
            return None
        above = outputs[head] = Output(head, below.base)
    if _same_change(below, above):
        del outputs[head]
        return None
    return False


def _same_change(below: Output, above: Output) -> bool:
    """Whether an embedding and a head end as the same matrix; the head's update is the embedding's, mirrored."""
    if (below.low_rank is None) != (above.low_rank is None) or below.bias or above.bias:
        return False
    if below.low_rank and above.low_rank:
        first, second = below.low_rank, above.low_rank
        if first.magnitude or second.magnitude or first.scale != second.scale:
            return False
        a, b = (second.b, second.a) if first.transposed != second.transposed else (second.a, second.b)
        if not (is_same(first.a, a, first.transposed != second.transposed) and
                is_same(first.b, b, first.transposed != second.transposed)):  # fmt: skip
            return False
    if below.tokens is None or above.tokens is None:
        if below.tokens is not above.tokens:
            return False
    elif below.tokens[1] != above.tokens[1] or not is_same(below.tokens[0], above.tokens[0]):
        return False
    return below.origin is above.origin or is_same(below.origin, above.origin)


def is_same(first: Tensor, second: Tensor, mirrored: bool = False) -> bool:
    """Whether two tensors hold the same values, read a block at a time."""
    if mirrored:  # small: they are adapter matrices
        return bool((first.rows(0, first.shape[0]).float() == second.rows(0, second.shape[0]).float().T).all())
    if first.shape != second.shape:
        return False
    for start, stop in row_blocks(first.shape):
        if not bool((first.rows(start, stop).float() == second.rows(start, stop).float()).all()):
            return False
    return True


def resized(
    outputs: Mapping[str, Output], embedding: str | None, head: str, base: Mapping[str, Tensor], adapter: Path
) -> int | None:
    """Return the new size of the vocabulary, where it changed."""
    if embedding is None:
        return None
    size = outputs[embedding].shape[0]
    if head in outputs and outputs[head].shape[0] != size:
        raise UserError(
            f"{adapter} brings an embedding of {size} tokens and leaves a head of {outputs[head].shape[0]}; "
            "save both (PEFT: save_embedding_layers=True)"
        )
    return size if size != base[embedding].shape[0] else None
