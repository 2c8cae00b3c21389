"""Text from a model or a file, with every character written out that would be invisible or would move others."""

from __future__ import annotations

import re

_HIDDEN = re.compile(
    # Control characters except line feed and tab; marks of text direction, line separators and zero-width blanks (but
    # not the joiners of scripts and emoji); halves of surrogate pairs.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return the text with hidden characters replaced by symbols: ESC becomes ␛, U+202E becomes ⟨U+202E⟩."""
    return _HIDDEN.sub(lambda found: _symbol(ord(found[0])), text)


def _symbol(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"
