"""From texts of tokens, which is all that some servers return, to the ids of a tokenizer: exactly, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for an incomplete character: a token may be a part of one."""


class TokenTexts:
    """Finds the ids of tokens by their texts.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._added: dict[str, int] = tokenizer.get_added_vocab()
        self._is_byte_level = "Ġ" in "".join(tokenizer.tokenize(" a"))
        """Whether the vocabulary writes bytes as characters, as GPT-2's does. Else it writes spaces as `▁`."""

    def ids(self, pieces: Sequence[str | bytes], text: str) -> list[int] | None:
        """Return the ids of the tokens of a completion, or None if they cannot be told exactly.

        A text names its token, because no two tokens have the same one. If a token is a part of a character, so that
        its text does not name it, the completion is encoded, which must give as many tokens with the same texts.

        Args:
            pieces: the text of each token, or its bytes.
            text: the whole completion. It may lack the special token at its end.
        """
        named = [self._id_of(piece) for piece in pieces]
        token_ids = [token_id for token_id in named if token_id is not None]
        if len(token_ids) == len(pieces):
            return token_ids

        end_ids = []
        if named[-1] is not None and named[-1] in self._added.values():
            end_ids = [named[-1]]
            pieces = pieces[:-1]
        encoded = self.encode(text)
        if len(encoded) != len(pieces):
            return None
        for token_id, piece in zip(encoded, pieces, strict=True):
            if not self._may_be(token_id, piece):
                return None
        return encoded + end_ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that continues another one. At the start of a text, some tokenizers add a space."""
        before_ids = self._encode("\n")
        token_ids = self._encode("\n" + text)
        if token_ids[: len(before_ids)] == before_ids:
            return token_ids[len(before_ids) :]
        return self._encode(text)  # which begins with a space or a line break

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def ids_of_greedy(self, text: str, num_tokens: int | None) -> list[int] | None:
        """Return the ids of a completion of which only the text is known, or None if it has another number of tokens.

        Args:
            num_tokens: number of tokens that the server counted, with or without an end token that it hides.
        """
        token_ids = self.encode(text)
        if num_tokens is None or num_tokens - len(token_ids) not in (0, 1):
            return None
        return token_ids

    def text_of_prompt(self, prompt_ids: list[int]) -> str:
        """Return the text of a prompt, without the special tokens that the tokenizer, and so the server's, adds."""
        text = str(self._tokenizer.decode(prompt_ids))
        bos = self._tokenizer.bos_token
        rest = text.removeprefix(bos) if bos else text
        return rest if self._tokenizer(rest)["input_ids"] == prompt_ids else text

    def _id_of(self, piece: str | bytes) -> int | None:
        """Return the id of the token with a text, or None if the text does not name one."""
        encoded = piece if isinstance(piece, bytes) else piece.encode()
        if _INCOMPLETE.encode() in encoded:
            return None
        text = encoded.decode(errors="replace")
        if text in self._added:
            return self._added[text]
        if self._is_byte_level:
            return self._vocabulary.get("".join(_CHARACTER_OF_BYTE[byte] for byte in encoded))
        token_id = self._vocabulary.get(text.replace(" ", "▁"))
        if token_id is None and len(encoded) == 1:
            token_id = self._vocabulary.get(f"<0x{encoded[0]:02X}>")
        return token_id

    def _may_be(self, token_id: int, piece: str | bytes) -> bool:
        """Whether a piece is the text of a token. Of a part of a character, only that it is one is known."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        text = token.replace("▁", " ") if "▁" in token else self._tokenizer.decode([token_id])
        shown = piece.decode(errors="replace") if isinstance(piece, bytes) else piece
        if _INCOMPLETE in text:
            return shown == "" or _INCOMPLETE in shown
        return bool(shown == text)


def _characters_of_bytes() -> dict[int, str]:
    """Return the character of each byte in the vocabulary of a byte-level tokenizer. Source: GPT-2's encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in characters:
            characters[byte] = chr(256 + len(characters) - len(printable))
    return characters


_CHARACTER_OF_BYTE = _characters_of_bytes()
