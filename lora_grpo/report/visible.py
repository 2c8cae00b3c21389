"""Replace characters that are invisible or that affect the position of other text."""

from __future__ import annotations

import re

_HIDDEN = re.compile(
    # Control characters except line feed and tab; text direction marks, line separators, and zero-width spaces (but
    # not the joiners used in scripts and emoji); lone surrogates.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Replace hidden characters with symbols: ESC becomes ␛, U+202E becomes ⟨U+202E⟩."""
    return _HIDDEN.sub(lambda found: _symbol(ord(found[0])), text)


def _symbol(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"
