"""Extract the program from a completion.

- Text before `</think>` is ignored. A completion with an unclosed `<think>` has no answer. Thinking is prose, where a
  quotation mark need not start a string, so a `</think>` that ends a line or comes before a fence always counts in it.
- The last fenced block that defines the entry point is used, so a model may correct itself. Names that the block uses
  but does not define are taken from earlier blocks.
- A block or text with only a function body is placed under the prompt's signature.
- Indented text without fences is treated as a continuation of the prompt, as a base model would produce, and is
  truncated at the usual stop sequences. Other text without fences starts at its first line of code and ends where it
  is no longer Python.
- The prompt's imports and helper functions come first, even if the model does not repeat them.
- Demonstrations are dropped: `if __name__ == "__main__":`, and statements that call the entry point, print, assert or
  read input. All other code is kept, and so is a demonstration that binds or changes something the entry point uses.
- The contents of strings are kept: special tokens, `</think>`, fences, and unusual spaces count only outside of them.
- Code that cannot be parsed is returned unchanged, and the sandbox rejects it.

Completions are parsed in the trainer's process. An answer of more than `MAX_CHARS` is therefore rejected, and each part
is parsed a fixed number of times.

Source: the stop sequences are from Chen et al. 2021 (arXiv:2107.03374), with `\\n@`, `\\nassert`, and the fence from
https://github.com/bigcode-project/bigcode-evaluation-harness. Dropping examples follows EvalPlus's `sanitize`.
"""

from __future__ import annotations

import re
import textwrap

from lora_grpo.tasks.program_text import assemble, context, defines, parse_start, under_signature

MAX_CHARS = 32_768
"""The longest answer that is parsed, in characters without the thinking section; real ones have at most a few 1,000."""

_STOP = re.compile(r"\n(?:class|def|if|print|@|assert|```)")
_LEXEMES = re.compile(
    r"""\\. | (\"{3}|'{3}) (?:\\.|(?!\1).)*+ \1 | "(?:\\.|[^"\\\n])*+" | '(?:\\.|[^'\\\n])*+'
    | (?P<space>[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]) | (?P<invisible>[\u200b-\u200d\u2060\ufeff])
    | (?P<tag>^[ \t]*+</?answer> | </?answer>[ \t]*+$ | </answer>[ \t]*+
              | <answer>(?=[ \t]*+(?:`{3}|@|(?:async|class|def|from|import)\b)))
    | (?P<thought></think>) | (?P<token><\|[a-z_]{1,20}\|>)""",
    re.M | re.S | re.X,
)
"""String literals, and what is special outside of them. Inside a line, `<answer>` may be a comparison."""
_THOUGHT_ENDS = re.compile(r"</think>(?=\s*?(?:\n|`{3}|~{3}|\Z))")
_UNQUOTED_THOUGHT = re.compile(r"(?<!['\"`])</think>")
_OPENING_QUOTE = re.compile(r"""\\. | (\"{3}|'{3}|\#) | "(?:\\.|[^"\\])*+" | '(?:\\.|[^'\\])*+'""", re.X)
_TRANSCRIPT = re.compile(r"^>>> (?:async )?(?:def|class)\b", re.M)
_LANGUAGE = re.compile(r"[\w.+{}-]{0,20}")
_OTHER_LANGUAGES = {"bash", "c", "console", "cpp", "diff", "html", "java", "javascript", "json", "markdown", "md"}
_OTHER_LANGUAGES |= {"output", "plaintext", "sh", "shell", "sql", "text", "txt", "xml", "yaml"}
_CODE_LINE = re.compile(r"^(?:import [\w.]+|from [\w.]+ import\b|(?:async )?def \w+\s*\(|class \w+\s*[(:]|@\w+)", re.M)
_RETURN = re.compile(r"(?:^|[:;])[ \t]*(?:return|yield)\b", re.M)


class AnswerTooLong(Exception):
    """An answer has more than `MAX_CHARS`."""


def extract_program(completion: str, entry_point: str, prefix: str = "") -> str | None:
    """Return the program in a completion, or None if there is no code. The result is valid UTF-8.

    `prefix` is the start of the program, which ends with the signature and docstring of the entry point; may be empty.

    Raises:
        AnswerTooLong: the completion has more than `MAX_CHARS` after its thinking section.
    """
    text = _answer(completion)
    if re.match(rf"\n*+[ \t]++(?:(?:import|from|@).*\n\s*+)*(?:async )?def {re.escape(entry_point)}\b", text):
        text = textwrap.dedent(text).lstrip()  # Some tokenizers start every text with a space.
    before, blocks = _split(text)
    continued = _continue(before, entry_point, prefix)
    if continued is not None:
        return continued
    # A string that is never closed must not hide the fences after it.
    hidden = _split(text, in_strings=True)[1]
    for candidates in [blocks, hidden] if hidden != blocks else [blocks]:
        for index, block in reversed([*enumerate(candidates)]):
            code = parse_start(block) if entry_point in block else None
            if code and defines(code, entry_point):
                return assemble(code, entry_point, prefix, candidates[:index])
    # The first fence may be part of a docstring.
    whole = text if text.startswith(before) and _definition(before, entry_point) else before
    program = _unfenced(before.rstrip(), whole, entry_point, prefix)
    if program is not None or not blocks:
        return program
    broken = [block for block in blocks if _definition(block, entry_point)]
    if not broken:
        returning = [block for block in blocks if _RETURN.search(block)] or blocks
        body = under_signature(returning[-1], entry_point, prefix)
        if body is not None:
            return body
    return context(prefix, entry_point) + (broken or blocks)[-1]


def cut_at_stop(completion: str) -> str:
    """Return a base model's continuation up to the first stop sequence."""
    stop = _STOP.search(completion)
    return completion[: stop.start()] if stop else completion


def _answer(completion: str) -> str:
    """Return the text after the thinking section, with normalized line endings, and spaces outside of strings."""
    text = completion.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    ends = [match for match in _LEXEMES.finditer(text) if match["thought"]][:1]
    if text.lstrip().startswith("<think>"):
        sure = _THOUGHT_ENDS.search(text)
        ends = sorted(filter(None, [*ends, sure]), key=re.Match.end) or [*_UNQUOTED_THOUGHT.finditer(text)]
        if not ends:
            return ""
    text = text[ends[0].end() :] if ends else text
    start = 0
    parts: list[str] = []
    for match in _LEXEMES.finditer(text):
        if not match.lastgroup or (match["tag"] and _in_comment(text, match)):
            continue
        parts += [text[start : match.start()], " " if match["space"] else "\n" if match["tag"] else ""]
        start = match.end()
        # Text after an end-of-turn token belongs to another turn.
        if match["token"] and any(map(str.strip, parts)):
            break
        if match["token"]:
            parts = []
    else:
        parts.append(text[start:])
    answer = "".join(parts)
    if len(answer) > MAX_CHARS:
        raise AnswerTooLong(f"the answer has {len(answer):,} characters; expected at most {MAX_CHARS:,}")
    return answer


def _in_comment(text: str, tag: re.Match[str]) -> bool:
    """Return whether a comment goes on after the tag."""
    line = text[max(0, tag.start() - 200) : tag.start()].rpartition("\n")[2]
    return "#" in line and text[tag.end() : tag.end() + 1] not in ("", "\n")


def _split(text: str, in_strings: bool = False) -> tuple[str, list[str]]:
    """Return the text before the first fence, and the non-empty blocks that may be Python, dedented.

    An unclosed block extends to the end. A fence with a language opens a new block even inside an open block. Fences in
    the strings of a block count only with `in_strings`.
    """
    before: list[str] = []
    blocks: list[list[str]] = []
    skipped: list[str] = []  # Blocks in other languages, and text between blocks.
    into, opened, quote = before, "", ""
    for line in text.split("\n"):
        fence = None if quote else _fence(line)
        if opened and not in_strings and (quote or fence is None):
            quote = _open_quote(line, quote)
        if fence is None:
            into.append(line)
            continue
        head, mark, inline, language = fence
        if inline:
            blocks.append([inline])
            into, opened = skipped, ""
        elif opened and (head.strip() if language else not mark.startswith(opened) or "#" in head):
            into.append(line)
        elif opened and not language:
            into.append(head)
            into, opened = skipped, ""
        else:
            if not opened:
                into.append(head)
            into, opened = skipped, mark
            if language.lower() not in _OTHER_LANGUAGES:
                into = []
                blocks.append(into)
    texts = ("\n".join(block).strip("\n") for block in blocks)
    # `dedent` would also empty the blank lines of strings.
    texts = (textwrap.dedent(text) if text[:1] in " \t" else text for text in texts)
    return _from_transcript("\n".join(before)), [_from_transcript(text) for text in texts if text.strip()]


def _open_quote(line: str, quote: str) -> str:
    """Return the triple quote that is open after a line of code, given the one before it; empty if there is none."""
    end = 0
    while True:
        if quote:
            end = line.find(quote, end) + 3
            if end < 3:
                return quote
        opening = next((match for match in _OPENING_QUOTE.finditer(line, end) if match[1]), None)
        if opening is None or opening[1] == "#":
            return ""
        quote, end = opening[1], opening.end()


def _from_transcript(text: str) -> str:
    """Return what was typed, if text is a transcript of an interactive session."""
    if not _TRANSCRIPT.search(text):
        return text
    return "\n".join(line[4:] for line in text.split("\n") if line.startswith((">>> ", "... ")))


def _fence(line: str) -> tuple[str, str, str, str] | None:
    """Return the text before a line's fence, the fence, the text up to a second fence, and the language.

    Return None for a line without a fence.
    """
    found = re.search(r"`{3,}|~{3,}", line)
    if not found:
        return None
    head, mark, rest = line[: found.start()], found[0], line[found.end() :]
    inline, second, tail = rest.partition(mark[:3])
    if second:  # A block on one line, or inline code in a sentence.
        inline = re.sub(r"^(?:python3?|py)\s+", "", inline).strip()
        return None if head.strip() or tail.strip() or not inline else ("", mark, inline, "")
    language = "python" if re.match(r"python3?\s", rest) else rest.strip()
    return (head, mark, "", language) if _LANGUAGE.fullmatch(language) else None


def _continue(text: str, entry_point: str, prefix: str) -> str | None:
    """Return the prompt followed by indented text, or None if the text is not a continuation."""
    body = cut_at_stop(text.strip("\n"))
    if not prefix or not body.startswith(("  ", "\t")):
        return None
    program = under_signature(body, entry_point, prefix)
    if program is not None or _CODE_LINE.search(text) or not _RETURN.search(body):
        return program
    return f"{prefix.rstrip()}\n{body}"


def _unfenced(text: str, whole: str, entry_point: str, prefix: str) -> str | None:
    """Return the program that starts in `text`, which `whole` continues."""
    code_line = _CODE_LINE.search(text)
    definition = _definition(text, entry_point)
    for start in sorted({0} | {match.start() for match in (code_line, definition) if match}):
        code = parse_start(whole[start:])
        if code and defines(code, entry_point):
            earlier = [whole[code_line.start() : start]] if code_line else []
            return assemble(code, entry_point, prefix, earlier)
    if not definition and _RETURN.search(text):
        body = under_signature(text, entry_point, prefix)
        if body is not None:
            return body
    begin = definition or code_line
    return context(prefix, entry_point) + text[begin.start() :] if begin else None


def _definition(text: str, entry_point: str) -> re.Match[str] | None:
    return re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", text, re.M)
