"""Find the answer of a completion by its marker: `#### `, `\\boxed{}`, or `<answer>`.

- An unclosed `<answer>` or `\\boxed{` is not an answer: a truncated `<answer>18` could have become 180.
- An answer after `####` may end the text, as in GSM8K's solutions. A verdict depends on the text alone, so a text that
  was cut after `#### 1` passes if the answer is 1.
- `####` before "Step 2" is a heading in Markdown, and its number is no answer. So are those of parts and cases.
- A box without braces, as in `$\\boxed 18$`, ends with its formula. Two solutions of MATH have one.
- All markers on the last marker's line count, so hedging (`#### 18 #### 19`) fails; a model may correct itself on a
  later line. The end of a `<reasoning>` section also ends a line.
"""

import re

_HEADING = r"[ \t]*\**(?i:step|part|case)[ \t]+[0-9]"
_MARKER = re.compile(rf"(?<!#)####(?!#|{_HEADING})|\\boxed\s?(?:\{{|(?=-?[0-9]))|<answer>")
_BRACE = re.compile(r"[{}]")
# The end of a formula, or of the line if the formula does not end on it.
_END_OF_FORMULA = re.compile(r"\$|\\[)\]]|\n")


def find_answers(answer: str) -> list[str] | None:
    """Return the contents of the answer markers on the last marker's line; None if a marker is not closed.

    Args:
        answer: a completion without the model's thoughts, see `thoughts.answer_of`.
    """
    # The reasoning is not part of the answer's line, even if both are on the same line.
    text = answer.replace("</reasoning>", "\n")
    markers = list(_MARKER.finditer(text))
    if not markers:
        return []

    contents: list[str] = []
    earliest_start = text.rfind("\n", 0, markers[-1].start()) + 1  # of a marker on the last marker's line
    for marker in markers:
        if marker.start() < earliest_start:  # on an earlier line, or nested in the previous marker
            continue
        end = _end_of_content(text, marker)
        if end is None:
            return None
        contents.append(text[marker.end() : end].strip())
        earliest_start = end
    return contents


def _end_of_content(text: str, marker: re.Match[str]) -> int | None:
    """Return where the content of a marker ends; None if it is not closed."""
    start = marker.end()
    if marker.group() == "####":
        line_break = text.find("\n", start)
        return line_break if line_break >= 0 else len(text)
    if marker.group() == "<answer>":
        closing_tag = text.find("</answer>", start)
        return closing_tag if closing_tag >= 0 else None

    if not marker.group().endswith("{"):  # a box without braces
        end = _END_OF_FORMULA.search(text, start)
        return end.start() if end and end.group() != "\n" else None

    # A box may contain braces, as in `\boxed{\text{18}}`.
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    return None
