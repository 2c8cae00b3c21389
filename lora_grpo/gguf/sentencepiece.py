"""Scores and space prefix of a SentencePiece model that is stored as a tokenizer.json, as in Llama 2.

tokenizer.json has the merges in order but no scores. The reference converter writes the same score for all tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError


def space_prefix(spec: Mapping[str, Any]) -> str:
    """Return when the tokenizer adds a space before text.

    `prepend` always adds a space. `always` and `first` add one unless the text starts with a space. `never` adds none.
    Raises UserError if tokenizer.json normalizes text differently from SentencePiece.
    """
    normalizer, pre = spec["normalizer"], spec["pre_tokenizer"]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if pre is None and normalizer is not None:
        steps = normalizer.get("normalizers", [normalizer])
        if steps == [{"type": "Prepend", "prepend": "▁"}, spaces]:
            return "prepend"
        if steps == [spaces]:
            return "never"
    if normalizer is None and pre is not None and pre["type"] == "Metaspace" and not pre["split"]:
        return str(pre["prepend_scheme"])
    raise UserError("the tokenizer does not normalize text as SentencePiece does; llama.cpp would make other tokens")


def merge_scores(tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Return scores with which llama.cpp applies the merges in order.

    SentencePiece joins any two pieces that form a token, highest score first. A list of merges may allow fewer joins.
    All splits of a token must therefore be in the list and adjacent, as in any list made from a SentencePiece model.

    Raises:
        UserError: a split of a token is missing or not adjacent to the others.
    """
    from gguf import TokenType

    merged = [left + right for left, right in merges]
    splits = Counter(merged)
    order = {token: rank for rank, token in enumerate(splits)}
    is_grouped = merged == list(splits.elements())
    # Some converters list special tokens as pieces. llama.cpp never merges text that contains one.
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    is_complete = all(
        sum(token[:i] in pieces and token[i:] in pieces for i in range(1, len(token))) <= splits[token]
        for token in pieces
    )
    if not (is_grouped and is_complete):
        raise UserError("the tokenizer's merges are not those of a SentencePiece model; llama.cpp would merge others")
    return [
        0.0 if kind == TokenType.BYTE else -float(order.get(token, len(order)))
        for token, kind in zip(tokens, types, strict=True)
    ]
