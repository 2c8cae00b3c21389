"""Text that a model or a file wrote, with every character that would not show, or would move others, written out."""

from __future__ import annotations

import re

_HIDDEN = re.compile(
    # Control characters but line feed and tab; marks that turn the direction of what follows, separators of lines, and
    # blanks without a width (the joiners of scripts and emoji stay); halves of surrogate pairs.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return the text with hidden characters as what stands for them: ESC is ␛, U+202E is ⟨U+202E⟩."""
    return _HIDDEN.sub(lambda found: _picture(ord(found[0])), text)


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"
