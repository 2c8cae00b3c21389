"""From a completion to the program it means: out of fences and prose, under the prompt's signature, without examples.

What is decided, and why:

- Thinking before `</think>` is not the answer; an unclosed `<think>` leaves no answer.
- Of several fenced blocks the last that defines the entry point counts, so that a model may correct itself. Names that
  it uses and does not define come from the blocks before it.
- A block or text that only holds a function's body goes under the prompt's signature, at its indentation.
- A text without fences that starts indented continues the prompt, as base models do: it is cut at the usual stop
  sequences. Another one begins at its first line of code and ends where it stops being Python.
- The prompt's imports and helper functions come first, whether the model repeats them or not.
- After the entry point only imports, definitions and the values they read are kept: example calls, asserts and
  `if __name__ == "__main__":` are the model's own tests, not its answer.
- What cannot be parsed is returned as it stands, for the sandbox to refuse; None means that there is no code at all.

Takes time linear in the completion's length: each part is parsed a fixed number of times.

Source: the stop sequences are those of Chen et al. 2021 (arXiv:2107.03374) with `\\n@`, `\\nassert` and the fence of
https://github.com/bigcode-project/bigcode-evaluation-harness; dropping examples follows EvalPlus's `sanitize`.
"""

from __future__ import annotations

import re
import textwrap

from lora_grpo.tasks.program_text import assemble, context, defines, parse_start, under_signature

STOP_SEQUENCES = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@", "\nassert", "\n```")
"""Where a base model's continuation of a function has gone past its end."""

_STOP = re.compile("|".join(map(re.escape, STOP_SEQUENCES)))
_SPECIAL_TOKEN = re.compile(r"<\|[a-z_]{1,20}\|>")
_LANGUAGE = re.compile(r"[\w.+{}-]{0,20}")
_OTHER_LANGUAGES = {"bash", "c", "console", "cpp", "diff", "html", "java", "javascript", "json", "markdown", "md"}
_OTHER_LANGUAGES |= {"output", "plaintext", "pycon", "sh", "shell", "sql", "text", "txt", "xml", "yaml"}
_CODE_LINE = re.compile(r"^(?:import [\w.]+|from [\w.]+ import\b|(?:async )?def \w+\s*\(|class \w+\s*[(:]|@\w+)", re.M)
_RETURN = re.compile(r"(?:^|[:;])[ \t]*(?:return|yield)\b", re.M)


def extract_program(completion: str, entry_point: str, prefix: str = "") -> str | None:
    """Return the program that a completion means, or None where it holds no code.

    Never raises, and what it returns can be encoded as UTF-8.

    Args:
        completion: the assistant's text, or a base model's continuation of `prefix`.
        entry_point: the name of the function that is asked for.
        prefix: the start of the program, ending in the function's signature and docstring; "" where there is none.
    """
    before, blocks = _split(_answer(completion))
    continued = _continue(before, entry_point, prefix)
    if continued is not None:
        return continued
    for place in reversed(range(len(blocks))):
        code = parse_start(blocks[place]) if entry_point in blocks[place] else None
        if code and defines(code, entry_point):
            return assemble(code, entry_point, prefix, blocks[:place])
    found = _unfenced(before.strip("\n").rstrip(), entry_point, prefix)
    if found is not None or not blocks:
        return found
    broken = [block for block in blocks if _definition(block, entry_point)]
    if not broken:
        returning = [block for block in blocks if _RETURN.search(block)] or blocks
        body = under_signature(returning[-1], entry_point, prefix)
        if body is not None:
            return body
    return context(prefix, entry_point) + (broken or blocks)[-1]


def cut_at_stop(completion: str) -> str:
    """Return a base model's continuation up to the first of the usual stop sequences."""
    stop = _STOP.search(completion)
    return completion[: stop.start()] if stop else completion


def _answer(completion: str) -> str:
    """Return the text after the thinking, with plain spaces and line ends."""
    text = completion.encode("utf-8", "replace").decode("utf-8")
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")
    text = text.replace("\ufeff", "").replace("\u200b", "")
    _, closed, answer = text.rpartition("</think>")
    if not closed and text.lstrip().startswith("<think>"):
        return ""
    # What follows the end of a turn is another one.
    return next((part for part in _SPECIAL_TOKEN.split(answer) if part.strip()), "")


def _split(text: str) -> tuple[str, list[str]]:
    """Return the text before the first fence, and the blocks that may be Python, dedented, without empty ones.

    A fence that is never closed holds the rest. One with a language opens a block also where another is still open.
    """
    before: list[str] = []
    blocks: list[list[str]] = []
    skipped: list[str] = []  # Takes what is no Python, and what stands between blocks.
    into, is_open, depth = before, False, 0
    for line in text.split("\n"):
        fence = _fence(line)
        indentation = len(line) - len(line.lstrip())
        # Four spaces in, a fence is part of the code: an example in a docstring.
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
    """Take a line with a fence apart; None where it has none.

    Returns:
        What stands before the marks, between two of them, and the language after the first.
    """
    mark = "```" if "```" in line else "~~~"
    head, found, rest = line.partition(mark)
    rest = rest.lstrip(mark[0])
    inline, second, tail = rest.partition(mark)
    if not found:
        return None
    if second:  # A block on one line, or words in a sentence.
        inline = re.sub(r"^(?:python3?|py)\s+", "", inline).strip()
        return None if head.strip() or tail.strip() or not inline else ("", inline, "")
    language = "python" if re.match(r"python3?\s", rest) else rest.strip()
    return (head, "", language) if _LANGUAGE.fullmatch(language) else None


def _continue(text: str, entry_point: str, prefix: str) -> str | None:
    """Put a text that begins indented under the prompt, as a base model means it; None where it is something else."""
    body = cut_at_stop(text.strip("\n"))
    if not prefix or not body.startswith(("  ", "\t")):
        return None
    whole = under_signature(body, entry_point, prefix)
    if whole is not None or _CODE_LINE.search(text) or not _RETURN.search(body):
        return whole
    return f"{prefix.rstrip()}\n{body}"


def _unfenced(text: str, entry_point: str, prefix: str) -> str | None:
    """Find the program in a text without fences, or return None."""
    if re.match(rf"[ \t]+(?:async )?def {re.escape(entry_point)}\b", text):
        text = text.lstrip()  # Some tokenizers begin every text with a space.
    code_line = _CODE_LINE.search(text)
    definition = _definition(text, entry_point)
    for start in sorted({0} | {found.start() for found in (code_line, definition) if found}):
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
    """Find where the function is defined in a text that need not be Python."""
    return re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", text, re.M)
