"""Extract the program from a completion.

- The model's thoughts are ignored. A completion with a thought that is not closed has no program.
- Indented text is treated as a continuation of the prompt, as a base model would produce, and is truncated at the
  usual stop sequences.
- The last fenced block that defines the entry point is used, so a model may correct itself. Names that the block uses
  but does not define are taken from earlier blocks.
- Text without fences starts at its first line of code and ends where it is no longer Python.
- A block or text with only a function body is placed under the prompt's signature.
- The prompt comes first, with its imports and helper functions, even if the model repeats them.
- Demonstrations are dropped: statements that call the entry point, print, assert or read input, unless a definition
  needs what they bind or change.
- Code that does not define the entry point is returned as it is, and the sandbox rejects it.

Completions are parsed in the trainer's process. An answer of more than `MAX_CHARS` therefore counts as no code, and
each part is parsed a fixed number of times. Up to that length, the parser needs little time and memory, except for
imports of long dotted names, which `parse_start` rejects.

Source: the stop sequences are from Chen et al. 2021 (arXiv:2107.03374), with `\\n@`, `\\nassert`, and the fence from
https://github.com/bigcode-project/bigcode-evaluation-harness. Dropping examples follows EvalPlus's `sanitize`.
docs/decisions/0024-final-statements.md counts the verdicts that each rule changes on real completions.
"""

import ast
import builtins
import re
import textwrap
from collections.abc import Sequence

from lora_grpo.grading.code_names import bound_names, read_names
from lora_grpo.grading.code_parsing import Code, defines, is_future_import, last_function, parse_start
from lora_grpo.grading.demonstrations import without_demonstrations
from lora_grpo.prompts import thoughts

MAX_CHARS = 32_768
"""The longest answer that is parsed, in characters without the thinking section. Most answers have a few thousand."""

# The stop sequences of HumanEval, before which a base model's continuation ends.
_STOP = re.compile(r"\n(?:class|def|if|print|@|assert|```)")
# Special tokens that remain in a text if the sampler does not know them.
_END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id)\|>")
# The start or the end of a fenced block.
_FENCE = re.compile(r"`{3,}")
# The language after an opening fence, and other words on its line: "python title=solution.py".
_LANGUAGE = re.compile(
    r"[ \t]*(?:python3?|py)?(?:[^\S\n][^\n]*)?\n|(?:python3?|py)[ \t]|[ \t]*[\w.+-]{1,20}[ \t]*\n", re.I
)
# Tags of the xml style around a program.
_ANSWER_TAG = re.compile(r"^[ \t]*</?answer>|</?answer>[ \t]*$", re.M)
# The first line of code in a text without fences.
_CODE_LINE = re.compile(r"^(?:import [\w.]+|from [\w.]+ import\b|(?:async )?def \w+\s*\(|class \w+\s*[(:]|@\w+)", re.M)
# A statement that only the body of a function has.
_RETURN = re.compile(r"(?:^|[:;])[ \t]*(?:return|yield)\b", re.M)


def extract_program(completion: str, entry_point: str, prefix: str = "") -> str | None:
    """Return the program in a completion, or None if there is no code. The result is valid UTF-8.

    Args:
        entry_point: name of the function to write.
        prefix: the start of the program, which ends with the signature and docstring of the entry point; may be empty.
    """
    text = _answer(completion)
    if len(text) > MAX_CHARS:
        return None
    before_fences, *parts = _FENCE.split(text)
    blocks = parts[::2]  # every second part is the text between two blocks

    # A base model continues the prompt with the body of the function.
    if prefix and _continues_prompt(before_fences, entry_point):
        continuation = _STOP.split(before_fences.strip("\n"), maxsplit=1)[0]
        program = _under_signature(continuation, entry_point, prefix)
        if program is not None:
            return program

    # The last source that defines the function counts. Earlier ones may define what it uses.
    sources = [_unfenced(before_fences, entry_point)]
    for block in blocks:
        sources.append(_dedented(_LANGUAGE.sub("", block, count=1)))
    for index in reversed(range(len(sources))):
        if entry_point not in sources[index]:
            continue
        code = parse_start(sources[index])
        if code and defines(code, entry_point):
            return _assemble(code, entry_point, prefix, sources[:index])

    # No source defines it, but one may be its body.
    for source in reversed([before_fences, *sources[1:]]):
        if _RETURN.search(source):
            program = _under_signature(source, entry_point, prefix)
            if program is not None:
                return program

    # The sandbox rejects what does not define the function, and says so.
    for source in reversed(sources):
        if source.strip():
            return _after_prompt(prefix, source)
    return None


def _answer(completion: str) -> str:
    """Return the text after the thinking section and before the end of the turn, with normalized line endings."""
    text = completion.encode("utf-8", "replace").decode("utf-8")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    answer = thoughts.answer_of(text) or ""
    turn = _END_OF_TURN.split(answer)[0]
    return _ANSWER_TAG.sub("\n", turn)


def _continues_prompt(text: str, entry_point: str) -> bool:
    """Return whether a text is indented, as the body of the prompt's function, and does not define it again."""
    is_indented = text.strip("\n").startswith(("  ", "\t"))
    return is_indented and not _definition(_dedented(text), entry_point)


def _unfenced(text: str, entry_point: str) -> str:
    """Return text from its first line of code, or from the definition of the entry point if that is Python and the
    text before it is not."""
    text = _dedented(text)
    first_line = _CODE_LINE.search(text)
    definition = _definition(text, entry_point)
    starts = [match.start() for match in (first_line, definition) if match]
    if not starts:
        return ""
    for start in starts:
        code = parse_start(text[start:])
        if code and defines(code, entry_point):
            return text[start:]
    return text[starts[-1] :]  # from the definition, if there is one


def _dedented(text: str) -> str:
    """Return text without its common indentation."""
    stripped = text.strip("\n")
    if not stripped.startswith((" ", "\t")):
        return text  # `dedent` would also empty the blank lines of strings
    return textwrap.dedent(stripped)


def _definition(text: str, entry_point: str) -> re.Match[str] | None:
    return re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", text, re.M)


def _under_signature(body: str, entry_point: str, prefix: str) -> str | None:
    """Return a program with `body` under the prompt's signature. Return None if there is no signature or valid body.

    The body may have any indentation, and its first line may lack it.
    """
    prompt = parse_start(prefix, attempts=1)
    if prompt is None:
        return None
    stub = last_function(prompt, entry_point)
    if stub is None:
        return None

    indent = " " * stub.body[0].col_offset
    body = body.strip("\n")
    first_line, _, other_lines = body.partition("\n")
    candidates = []
    if body.startswith((" ", "\t")):
        candidates.append(body)
    candidates.append(textwrap.indent(textwrap.dedent(body), indent))
    candidates.append(f"{indent}{first_line.lstrip()}\n{other_lines}")

    for candidate in candidates:
        code = parse_start(f"{prefix.rstrip()}\n{candidate}")
        if code is None:
            continue
        function = last_function(code, entry_point)
        if function and len(function.body) > len(stub.body):
            return _assemble(code, entry_point)
    return None


def _assemble(code: Code, entry_point: str, prefix: str = "", earlier_sources: Sequence[str] = ()) -> str:
    """Assemble the program from code that defines the entry point, without demonstrations.

    The prompt, `prefix`, comes first, then definitions from earlier sources of names that the code uses but does not
    define.
    """
    known_names = set(dir(builtins))
    prompt = parse_start(prefix, attempts=1)
    if prompt:
        known_names |= _bound_by(prompt)

    parts = [without_demonstrations(code, entry_point, {entry_point})]
    for source in reversed(earlier_sources):
        read: set[str] = set()
        for part in parts:
            known_names |= _bound_by(part)
            read |= _read_by(part)
        missing_names = read - known_names
        if not missing_names:
            break
        earlier_code = parse_start(source)
        if earlier_code and not missing_names.isdisjoint(_bound_by(earlier_code)):
            parts.insert(0, without_demonstrations(earlier_code, entry_point, missing_names))

    text = "\n\n".join(part.text.strip("\n") for part in parts) + "\n"
    if prefix:
        return _after_prompt(prefix, text)
    # Future imports must be the first statements of a program, so they are left out after a prompt.
    statements = [statement for part in parts for statement in part.body]
    future_imports = [f"{ast.unparse(statement)}\n" for statement in statements if is_future_import(statement)]
    return "".join(future_imports) + text


def _bound_by(code: Code) -> set[str]:
    return set().union(*(bound_names(statement) for statement in code.body))


def _read_by(code: Code) -> set[str]:
    return set().union(*(read_names(statement) for statement in code.body))


def _after_prompt(prefix: str, program: str) -> str:
    """Place a program after the prompt, as in the official HumanEval harness."""
    if program.startswith(prefix):
        return program
    return f"{prefix}\n{program}"
