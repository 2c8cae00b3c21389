"""A SentencePiece model stored as a tokenizer.json, as Llama 2's is: its scores, and where it adds a space.

tokenizer.json holds the merges in order but not the scores, and the reference converter writes the same score for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError


def space_prefix(spec: Mapping[str, Any]) -> str:
    """Return when a space is put before text: `prepend`, or unless it begins with one `always`, `first` or `never`.

    Args:
        spec: the parsed tokenizer.json.

    Raises:
        UserError: the tokenizer normalizes text differently from SentencePiece.
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
    """Return scores that make llama.cpp merge in the order of the merges.

    SentencePiece joins any two pieces that make a token, highest score first; a list of merges may allow fewer. So all
    splits of a token must be among its merges, and adjacent, as in every list made from a SentencePiece model.

    Raises:
        UserError: they are not.
    """
    from gguf import TokenType

    merged = [left + right for left, right in merges]
    splits = Counter(merged)
    order = {token: rank for rank, token in enumerate(splits)}
    is_grouped = merged == list(splits.elements())
    # Some converters list special tokens among the pieces; llama.cpp never merges text that contains one.
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
