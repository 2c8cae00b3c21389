"""Text output: tables, and escaping of text from files and models for terminals and pages."""

import re
from collections.abc import Iterable, Sequence


def printable(text: str) -> str:
    """Escape control characters and characters that cannot be encoded, because names come from files."""
    return "".join(map(_printable_character, text))


def _printable_character(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def markdown(text: str) -> str:
    """Escape text so that GitHub shows it literally on one line, without markup, mentions, or links."""
    line = printable(" ".join(str(text).split()))
    # Characters of HTML tags and entities, and the marks at which GitHub would notify a user or link an issue. No tag
    # begins with a digit: "<0.001" stays.
    line = re.sub(r"[&>]|<(?!\d)|(?<!\w)[@#]", _html_entity, line)
    # GitHub would turn these into links.
    line = line.replace("://", "&#58;//").replace("www.", "www&#46;")
    # Marks of code, emphasis, tables and links. An underscore inside a word is no mark.
    return re.sub(r"([\\`*|~]|(?<!\w)_|_(?!\w)|(?<=\])[(\[])", r"\\\1", line)


def _html_entity(match: re.Match[str]) -> str:
    return f"&#{ord(match[0])};"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int | None = None) -> list[str]:
    """Return the lines of a table followed by an empty line. Cells may contain any text.

    Args:
        left: number of columns that are aligned to the left; the others are aligned to the right. By default, only the
            first one is, but in a table of two columns both are.
    """
    if left is None:
        left = 1 if len(headings) > 2 else len(headings)
    alignment = ["---"] * left + ["---:"] * (len(headings) - left)
    return [_table_line(headings), f"|{'|'.join(alignment)}|", *map(_table_line, rows), ""]


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table for the terminal."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return ["  ".join(map(str.rjust, cells, widths)) for cells in (headings, *rows)]


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(markdown(cell) for cell in cells)} |"
