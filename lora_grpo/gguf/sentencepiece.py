"""Scores and space prefix of a SentencePiece model that is stored as a tokenizer.json, as in Llama 2.

tokenizer.json has the merges in order but no scores. The reference converter writes the same score for all tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError


def space_prefix(spec: Mapping[str, Any], opening: str) -> tuple[bool, list[str]]:
    """Return whether llama.cpp should add a space before text, and notes on texts that get other tokens.

    Args:
        spec: tokenizer.json.
        opening: a rendered chat.

    Raises:
        UserError: tokenizer.json normalizes text differently from SentencePiece.
    """
    normalizer, pre = spec["normalizer"], spec["pre_tokenizer"]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if pre is None and normalizer is not None:
        steps = normalizer.get("normalizers", [normalizer])
        if steps in ([{"type": "Prepend", "prepend": "▁"}, spaces], [spaces]):
            return len(steps) == 2, []
    if normalizer is not None or pre is None or pre["type"] != "Metaspace" or pre["split"]:
        raise UserError("the tokenizer does not normalize text as SentencePiece does; llama.cpp makes other tokens")
    if pre["prepend_scheme"] != "first":
        return pre["prepend_scheme"] == "always", []
    # transformers adds a space before the first text only, and llama.cpp also after every special token. The chat
    # template decides, because a model that follows instructions is prompted through it.
    if any(opening.startswith(token["content"]) for token in spec["added_tokens"]):
        return False, [
            "llama.cpp will add no space before plain text, as transformers does, so its first word has other tokens; "
            "start plain text with a space. Chats have the same tokens"
        ]
    return True, [
        "llama.cpp adds a space after every special token, and transformers only at the start of a text; prompts with "
        "special tokens have other tokens"
    ]


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
