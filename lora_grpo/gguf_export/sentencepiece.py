"""A SentencePiece model that is kept as a tokenizer.json, as Llama 2's is: its scores, and where it puts a space.

The scores are not in the file, and the reference converter gives every token the same one there; but the merges stand
in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError


def space_prefix(spec: Mapping[str, Any]) -> str:
    """Return when a space is put before text: `prepend`, or before all but a space `always`, `first` or `never`."""
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
    raise UserError("the tokenizer prepares text in another way than SentencePiece; llama.cpp would make other tokens")


def merge_scores(tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Return the scores by which llama.cpp merges in the order of the merges.

    SentencePiece joins any two pieces that make a token, the best-scored token first; a list of merges can allow less.
    So every cut of a token must be among its merges, one token after the other, as in all that were made from a
    SentencePiece model.

    Raises:
        UserError: they are not.
    """
    from gguf import TokenType

    order: dict[str, int] = {}
    cuts: dict[str, int] = {}
    last = ""
    tidy = True
    for left, right in merges:
        token = left + right
        tidy &= token == last or token not in order
        order.setdefault(token, len(order))
        cuts[token] = cuts.get(token, 0) + 1
        last = token
    # Some converters put special tokens among the pieces too; text never reaches llama.cpp's merging with one in it.
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    for token in pieces:
        possible = sum(token[:at] in pieces and token[at:] in pieces for at in range(1, len(token)))
        tidy &= possible <= cuts.get(token, 0)
    if not tidy:
        raise UserError(
            "the tokenizer's merges are not those of a SentencePiece model; llama.cpp would join other pieces than it"
        )
    return [
        0.0 if kind == TokenType.BYTE else -float(order.get(token, len(order)))
        for token, kind in zip(tokens, types, strict=True)
    ]
