"""Text output: Markdown tables, and escaping of text from files and models for terminals and pages."""

import re
from collections.abc import Iterable, Sequence


def printable(text: str) -> str:
    """Escape control characters and characters that cannot be encoded, because names come from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def markdown(text: str) -> str:
    """Escape text so that GitHub shows it literally on one line, without markup, mentions, or links."""
    line = printable(" ".join(str(text).split()))
    # GitHub would notify mentioned users, and would link issue numbers and URLs. No tag begins with a digit: "<0.001".
    line = re.sub(r"[&>]|<(?!\d)|(?<!\w)[@#]", lambda found: f"&#{ord(found[0])};", line)
    line = line.replace("://", "&#58;//").replace("www.", "www&#46;")
    return re.sub(r"([\\`*|~]|(?<!\w)_|_(?!\w)|(?<=\])[(\[])", r"\\\1", line)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int | None = None) -> list[str]:
    """Return the lines of a table followed by an empty line. Cells may contain any text.

    Args:
        left: number of columns that are aligned to the left; the others are aligned to the right. Default: one, or both
            of two.
    """
    if left is None:
        left = 1 if len(headings) > 2 else len(headings)
    alignment = ["---"] * left + ["---:"] * (len(headings) - left)
    cells = [list(map(markdown, row)) for row in (headings, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"|{'|'.join(alignment)}|", *lines[1:], ""]
