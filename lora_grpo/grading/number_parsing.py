"""Read the number of an answer, such as `18`, `$1,000`, `−5 °C` or `18\\ \\text{cm}`.

- Words, units, currency signs, and percent signs around the number are ignored. A dash before it is a minus sign.
- LaTeX that does not change the value is ignored, too: `\\(18\\)`, `18\\ \\text{cm}`, `\\displaystyle 18`, `90^\\circ`.
- Commas must separate groups of three digits, so `1,8` is not 18. LaTeX's `\\,` and the spaces of typesetters (thin,
  narrow, no-break) separate such groups, too. Two numbers fail, even if they are equal.
- Numbers have ASCII or full-width digits and are compared as `Decimal`: 18 = 18.00 = 018, but 17.99 and 18.0001 are
  wrong. Formulas (`\\sqrt{18}`, `2^3`), exponents, superscripts, nan, and inf are not numbers.
"""

import re
import unicodedata
from decimal import Decimal

# A well-formed number: 18, 1,800, 18.5 or .5.
_NUMBER = re.compile(r"-?(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
# What may be a number, well-formed or not.
_DIGIT_RUN = re.compile(r"[0-9.,]+")

# Minus signs, hyphens and full-width characters, and their ASCII equivalents.
_ASCII = str.maketrans("−–－‐‑‒﹣⁻＋．，？０１２３４５６７８９", "--------+.,?0123456789")
# Groups of three digits with thin spaces between them.
_SPACED_GROUPS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:\\,|[\u00a0\u2009\u202f])[0-9]{3})+(?![0-9])")
# One such space.
_THIN_SPACE = re.compile(r"\\,|[\u00a0\u2009\u202f]")
# Square meters and the like, whose superscript is no power of the number. In `m^2 = 18`, m is a variable.
_LENGTH = "(?:[dckm]?m|in|ft|yd|mi)"
_POWER = r"\s?\^\s?(?:[23]|\{[23]\})(?![0-9])"
_UNIT_POWER = re.compile(
    rf"(?<![a-zA-Z]){_LENGTH}[²³]"
    rf"|(?:(?<=[0-9])|(?<=[0-9][ ~])){_LENGTH}{_POWER}"
    rf"|\\(?:text|mathrm)\s?\{{\s?{_LENGTH}\.?\s?\}}{_POWER}"
)
# Commands of LaTeX that set their argument in a font or a frame.
_LATEX_FONTS = (
    "text|textnormal|textrm|textbf|textit|textsf|texttt|textup|textmd|emph|underline|mathrm|mathbf|mathit|mathsf|mathtt|"
    "mathnormal|boldsymbol|bm|mbox|hbox|fbox|boxed"
)
# Commands without an argument: styles, sizes, spaces, signs of currency and degrees.
_LATEX_SWITCHES = (
    "displaystyle|textstyle|scriptstyle|bf|rm|it|normalsize|large|Large|LARGE|huge|Huge|quad|qquad|enspace|thinspace|"
    "pounds|euro|degree"
)
# All LaTeX that does not change a number's value. Any other backslash, or a symbol in _FORMULA, makes it a formula.
_LATEX_FORMATTING = re.compile(
    rf"\\(?:{_LATEX_FONTS})\s?\{{"
    rf"|\\(?:{_LATEX_SWITCHES})(?![a-zA-Z])"
    r"|\\(?:text)?color\s?\{[a-zA-Z]+\}"
    r"|\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?"  # the dot of `\left.` is an invisible bracket, not a point
    r"|\^\s?\{?\s?\\circ(?![a-zA-Z])"
    r"|\\[$%,!;:> ]"
    r"|,\\!|\{,\}"  # commas between groups of digits
)
# The parts of it that separate groups of digits.
_LATEX_COMMAS = (",\\!", "{,}")
# Brackets of inline and displayed math. Final statements need them, because they close a statement.
_LATEX_BRACKETS = re.compile(r"\\[()\[\]]")
# What only a formula contains.
_FORMULA = re.compile(r"[\\^√±π∞]")
# What may stand between a minus sign and the number.
_BETWEEN_SIGN_AND_NUMBER = " $€£¥*_({[}"


def is_number(text: str) -> bool:
    """Return whether a text is one well-formed number and nothing else."""
    return _NUMBER.fullmatch(text) is not None


def value_of(number: str) -> Decimal:
    """Return the value of a well-formed number, such as "1,800.5"."""
    return Decimal(number.replace(",", ""))


def numbers_in(content: str) -> list[str]:
    """Return up to two signed numbers of an answer. Two numbers mean that the answer is ambiguous.

    A number may be malformed (`1,8`). A formula is returned as a single malformed number.
    """
    text = _LATEX_BRACKETS.sub(" ", without_formatting(content))
    if _FORMULA.search(text) or _has_unicode_numbers(text):
        return [content]

    numbers: list[str] = []
    for run in _DIGIT_RUN.finditer(text):
        digits = run.group().lstrip(",").rstrip(".,")
        if not digits:  # only punctuation
            continue
        if numbers:
            return [*numbers, digits]
        text_before = text[: run.start()].rstrip(_BETWEEN_SIGN_AND_NUMBER)
        sign = "-" if text_before.endswith("-") else ""
        numbers.append(sign + digits)
    return numbers


def without_formatting(content: str) -> str:
    """Return an answer with ASCII digits and signs, with commas in place of thin spaces, and without formatting."""
    text = content.translate(_ASCII)
    text = _UNIT_POWER.sub(" square units", text)
    text = _SPACED_GROUPS.sub(lambda groups: _THIN_SPACE.sub(",", groups.group()), text)
    return _LATEX_FORMATTING.sub(lambda match: "," if match.group() in _LATEX_COMMAS else " ", text)


def _has_unicode_numbers(text: str) -> bool:
    """Return whether a text contains digits, fractions or superscripts beyond ASCII, such as ½, ² or ٣."""
    return any(unicodedata.category(character).startswith("N") for character in text if not character.isascii())
