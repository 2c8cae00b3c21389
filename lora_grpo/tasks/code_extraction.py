"""Extract the program from a completion.

- Text before `</think>` is ignored. A completion with an unclosed `<think>` has no answer.
- Indented text is treated as a continuation of the prompt, as a base model would produce, and is truncated at the
  usual stop sequences.
- The last fenced block that defines the entry point is used, so a model may correct itself. Names that the block uses
  but does not define are taken from earlier blocks.
- Text without fences starts at its first line of code and ends where it is no longer Python.
- A block or text with only a function body is placed under the prompt's signature.
- The prompt's imports and helper functions come first, even if the model does not repeat them.
- Demonstrations are dropped: statements that call the entry point, print, assert or read input, unless a definition
  needs what they bind or change.
- Code that cannot be parsed is returned unchanged, and the sandbox rejects it.

Completions are parsed in the trainer's process. An answer of more than `MAX_CHARS` is therefore rejected, and each part
is parsed a fixed number of times.

Source: the stop sequences are from Chen et al. 2021 (arXiv:2107.03374), with `\\n@`, `\\nassert`, and the fence from
https://github.com/bigcode-project/bigcode-evaluation-harness. Dropping examples follows EvalPlus's `sanitize`.
docs/decisions/0024-final-statements.md counts the verdicts that each rule changes on real completions.
"""

from __future__ import annotations

import re
import textwrap

from lora_grpo.tasks.program_text import assemble, context, defines, parse_start, under_signature

MAX_CHARS = 32_768
"""The longest answer that is parsed, in characters without the thinking section; real ones have at most a few 1,000."""

_STOP = re.compile(r"\n(?:class|def|if|print|@|assert|```)")
_END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id)\|>")
_FENCE = re.compile(r"`{3,}")
_LANGUAGE = re.compile(
    r"[ \t]*(?:python3?|py)?(?:[^\S\n][^\n]*)?\n|(?:python3?|py)[ \t]|[ \t]*[\w.+-]{1,20}[ \t]*\n", re.I
)
_ANSWER_TAG = re.compile(r"^[ \t]*</?answer>|</?answer>[ \t]*$", re.M)
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
    before, *blocks = _FENCE.split(text)
    continued = ""
    if prefix and before.strip("\n").startswith(("  ", "\t")) and not _definition(_dedented(before), entry_point):
        continued = cut_at_stop(before.strip("\n"))
        program = under_signature(continued, entry_point, prefix)
        if program is not None:
            return program
    # Every second part is the text between two blocks.
    sources = [_unfenced(before, entry_point), *(_dedented(_LANGUAGE.sub("", block, count=1)) for block in blocks[::2])]
    for index, source in reversed([*enumerate(sources)]):
        code = parse_start(source) if entry_point in source else None
        if code and defines(code, entry_point):
            return assemble(code, entry_point, prefix, sources[:index])
    for source in reversed([before, *sources[1:]]):
        program = under_signature(source, entry_point, prefix) if _RETURN.search(source) else None
        if program is not None:
            return program
    written = [source for source in sources if source.strip()]
    if continued and not written:
        return f"{prefix.rstrip()}\n{continued}"
    broken = [source for source in written if _definition(source, entry_point)]
    return context(prefix, entry_point) + (broken or written)[-1] if written else None


def cut_at_stop(completion: str) -> str:
    """Return a base model's continuation up to the first stop sequence."""
    stop = _STOP.search(completion)
    return completion[: stop.start()] if stop else completion


def _answer(completion: str) -> str:
    """Return the text after the thinking section and before the end of the turn, with normalized line endings."""
    text = completion.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    thoughts, closed, rest = text.partition("</think>")
    if closed or thoughts.lstrip().startswith("<think>"):
        text = rest
    text = _ANSWER_TAG.sub("\n", _END_OF_TURN.split(text)[0])
    if len(text) > MAX_CHARS:
        raise AnswerTooLong(f"the answer has {len(text):,} characters; expected at most {MAX_CHARS:,}")
    return text


def _unfenced(text: str, entry_point: str) -> str:
    """Return text from its first line of code, or from the definition of the entry point if that is Python and the
    text before it is not."""
    text = _dedented(text)
    lines = [match.start() for match in (_CODE_LINE.search(text), _definition(text, entry_point)) if match]
    for start in lines:
        code = parse_start(text[start:])
        if code and defines(code, entry_point):
            return text[start:]
    return text[lines[-1] :] if lines else ""


def _dedented(text: str) -> str:
    # `dedent` would also empty the blank lines of strings.
    return textwrap.dedent(text.strip("\n")) if text.strip("\n")[:1] in (" ", "\t") else text


def _definition(text: str, entry_point: str) -> re.Match[str] | None:
    return re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", text, re.M)
