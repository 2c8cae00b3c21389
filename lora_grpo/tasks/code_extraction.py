"""Extract the program from a completion.

- Text before `</think>` is ignored. A completion with an unclosed `<think>` has no answer.
- The last fenced block that defines the entry point is used, so a model may correct itself. Names that the block uses
  but does not define are taken from earlier blocks.
- A block or text with only a function body is placed under the prompt's signature.
- Indented text without fences is treated as a continuation of the prompt, as a base model would produce, and is
  truncated at the usual stop sequences. Other text without fences starts at its first line of code and ends where it
  is no longer Python.
- The prompt's imports and helper functions come first, even if the model does not repeat them.
- After the entry point, only imports, definitions, and the values they read are kept. Example calls, asserts, and
  `if __name__ == "__main__":` are dropped.
- Code that cannot be parsed is returned unchanged, and the sandbox rejects it.

The time is linear in the length of the completion, because each part is parsed a fixed number of times.

Source: the stop sequences are from Chen et al. 2021 (arXiv:2107.03374), with `\\n@`, `\\nassert`, and the fence from
https://github.com/bigcode-project/bigcode-evaluation-harness. Dropping examples follows EvalPlus's `sanitize`.
"""

from __future__ import annotations

import re
import textwrap

from lora_grpo.tasks.program_text import assemble, context, defines, parse_start, under_signature

_STOP = re.compile(r"\n(?:class|def|#|if|print|@|assert|```)")
_SPECIAL_TOKEN = re.compile(r"<\|[a-z_]{1,20}\|>")
_LANGUAGE = re.compile(r"[\w.+{}-]{0,20}")
_OTHER_LANGUAGES = {"bash", "c", "console", "cpp", "diff", "html", "java", "javascript", "json", "markdown", "md"}
_OTHER_LANGUAGES |= {"output", "plaintext", "pycon", "sh", "shell", "sql", "text", "txt", "xml", "yaml"}
_CODE_LINE = re.compile(r"^(?:import [\w.]+|from [\w.]+ import\b|(?:async )?def \w+\s*\(|class \w+\s*[(:]|@\w+)", re.M)
_RETURN = re.compile(r"(?:^|[:;])[ \t]*(?:return|yield)\b", re.M)


def extract_program(completion: str, entry_point: str, prefix: str = "") -> str | None:
    """Return the program in a completion, or None if there is no code. Never raises; the result is valid UTF-8.

    `prefix` is the start of the program, which ends with the signature and docstring of the entry point; may be empty.
    """
    before, blocks = _split(_answer(completion))
    continued = _continue(before, entry_point, prefix)
    if continued is not None:
        return continued
    for index, block in reversed([*enumerate(blocks)]):
        code = parse_start(block) if entry_point in block else None
        if code and defines(code, entry_point):
            return assemble(code, entry_point, prefix, blocks[:index])
    program = _unfenced(before.strip("\n").rstrip(), entry_point, prefix)
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
    """Return the text after the thinking section, with normalized spaces and line endings."""
    text = completion.encode("utf-8", "replace").decode("utf-8")
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")
    text = text.replace("\ufeff", "").replace("\u200b", "")
    _, closed, answer = text.rpartition("</think>")
    if not closed and text.lstrip().startswith("<think>"):
        return ""
    # Text after an end-of-turn token belongs to another turn.
    return next((part for part in _SPECIAL_TOKEN.split(answer) if part.strip()), "")


def _split(text: str) -> tuple[str, list[str]]:
    """Return the text before the first fence, and the non-empty blocks that may be Python, dedented.

    An unclosed block extends to the end. A fence with a language opens a new block even inside an open block.
    """
    before: list[str] = []
    blocks: list[list[str]] = []
    skipped: list[str] = []  # Blocks in other languages, and text between blocks.
    into, is_open, depth = before, False, 0
    for line in text.split("\n"):
        fence = _fence(line)
        indentation = len(line) - len(line.lstrip())
        # A fence indented by four or more extra spaces is part of the code, for example in a docstring.
        if fence is None or (is_open and not fence[0].strip() and indentation > depth + 3):
            into.append(line)
            continue
        head, inline, language = fence
        if inline:
            blocks.append([inline])
            into, is_open = skipped, False
        elif is_open and not language:
            into.append(head)
            into, is_open = skipped, False
        elif is_open and head.strip():
            into.append(line)
        else:
            if not is_open:
                into.append(head)
            into, is_open, depth = skipped, True, indentation
            if language.lower() not in _OTHER_LANGUAGES:
                into = []
                blocks.append(into)
    texts = (textwrap.dedent("\n".join(block)).strip("\n") for block in blocks)
    return "\n".join(before), [text for text in texts if text.strip()]


def _fence(line: str) -> tuple[str, str, str] | None:
    """Return the text before a line's fence, the text between two fences, and the language. None without a fence."""
    mark = "```" if "```" in line else "~~~"
    head, fence, rest = line.partition(mark)
    rest = rest.lstrip(mark[0])
    inline, second, tail = rest.partition(mark)
    if not fence:
        return None
    if second:  # A block on one line, or inline code in a sentence.
        inline = re.sub(r"^(?:python3?|py)\s+", "", inline).strip()
        return None if head.strip() or tail.strip() or not inline else ("", inline, "")
    language = "python" if re.match(r"python3?\s", rest) else rest.strip()
    return (head, "", language) if _LANGUAGE.fullmatch(language) else None


def _continue(text: str, entry_point: str, prefix: str) -> str | None:
    """Return the prompt followed by indented text, or None if the text is not a continuation."""
    body = cut_at_stop(text.strip("\n"))
    if not prefix or not body.startswith(("  ", "\t")):
        return None
    program = under_signature(body, entry_point, prefix)
    if program is not None or _CODE_LINE.search(text) or not _RETURN.search(body):
        return program
    return f"{prefix.rstrip()}\n{body}"


def _unfenced(text: str, entry_point: str, prefix: str) -> str | None:
    if re.match(rf"[ \t]+(?:async )?def {re.escape(entry_point)}\b", text):
        text = text.lstrip()  # Some tokenizers start every text with a space.
    code_line = _CODE_LINE.search(text)
    definition = _definition(text, entry_point)
    for start in sorted({0} | {match.start() for match in (code_line, definition) if match}):
        code = parse_start(text[start:])
        if code and defines(code, entry_point):
            return assemble(code, entry_point, prefix)
    if not definition and _RETURN.search(text):
        body = under_signature(text, entry_point, prefix)
        if body is not None:
            return body
    begin = definition or code_line
    return context(prefix, entry_point) + text[begin.start() :] if begin else None


def _definition(text: str, entry_point: str) -> re.Match[str] | None:
    return re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", text, re.M)
