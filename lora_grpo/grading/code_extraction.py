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
import warnings
from collections.abc import Collection, Sequence
from typing import NamedTuple

from lora_grpo.prompts import thoughts

MAX_CHARS = 32_768
"""The longest answer that is parsed, in characters without the thinking section. Most answers have a few thousand."""

_STOP = re.compile(r"\n(?:class|def|if|print|@|assert|```)")
_END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id)\|>")
_FENCE = re.compile(r"`{3,}")
_LANGUAGE = re.compile(
    r"[ \t]*(?:python3?|py)?(?:[^\S\n][^\n]*)?\n|(?:python3?|py)[ \t]|[ \t]*[\w.+-]{1,20}[ \t]*\n", re.I
)
_ANSWER_TAG = re.compile(r"^[ \t]*</?answer>|</?answer>[ \t]*$", re.M)
_CODE_LINE = re.compile(r"^(?:import [\w.]+|from [\w.]+ import\b|(?:async )?def \w+\s*\(|class \w+\s*[(:]|@\w+)", re.M)
_RETURN = re.compile(r"(?:^|[:;])[ \t]*(?:return|yield)\b", re.M)
_STATEMENT_LINE = re.compile(r"[^\s#)\]}]")
_LONG_IMPORT = re.compile(r"\b(?:import|from)\b[\s\\]*(?:\w++[\s\\]*\.[\s\\]*+){100}")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_DEMONSTRATION = {
    *("assert", "print", "input", "open", "exit", "quit", "argv", "stdin", "__name__", "doctest", "unittest")
}
_PARSE_ATTEMPTS = 4


class Code(NamedTuple):
    text: str
    body: list[ast.stmt]


def extract_program(completion: str, entry_point: str, prefix: str = "") -> str | None:
    """Return the program in a completion, or None if there is no code. The result is valid UTF-8.

    `prefix` is the start of the program, which ends with the signature and docstring of the entry point; may be empty.
    """
    text = _answer(completion)
    if len(text) > MAX_CHARS:
        return None
    before, *blocks = _FENCE.split(text)
    if prefix and before.strip("\n").startswith(("  ", "\t")) and not _definition(_dedented(before), entry_point):
        program = under_signature(_STOP.split(before.strip("\n"), maxsplit=1)[0], entry_point, prefix)
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
    return _after(prefix, written[-1]) if written else None


def _answer(completion: str) -> str:
    """Return the text after the thinking section and before the end of the turn, with normalized line endings."""
    text = completion.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    text = thoughts.answer_of(text) or ""
    return _ANSWER_TAG.sub("\n", _END_OF_TURN.split(text)[0])


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


def parse_start(text: str, attempts: int = _PARSE_ATTEMPTS) -> Code | None:
    """Parse text up to a truncated statement or prose. Return None if there is no Python before it.

    Args:
        attempts: maximum number of parses; with 1, all of it must be Python.
    """
    for _ in range(attempts):
        if _LONG_IMPORT.search(text):  # CPython needs quadratic time and memory for these.
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # For example, for "\d" in a string.
                return Code(text, ast.parse(text).body)
        except SyntaxError as error:
            # The statement that contains the error starts on an earlier line that is not indented.
            lines = text.split("\n")
            cut = min(error.lineno or 1, len(lines)) - 1
            while cut > 0 and not _STATEMENT_LINE.match(lines[cut]):
                cut -= 1
            if cut <= 0:
                return None
            text = "\n".join(lines[:cut])
        except (ValueError, MemoryError, RecursionError):  # NUL characters and deep nesting.
            return None
    return None


def defines(code: Code, name: str) -> bool:
    """Return whether the code defines or assigns the name at the top level. Imports do not count."""
    return any(name in bound_names(node) for node in code.body if not isinstance(node, (ast.Import, ast.ImportFrom)))


def assemble(code: Code, entry_point: str, prefix: str = "", earlier: Sequence[str] = ()) -> str:
    """Assemble the program from code that defines the entry point, without demonstrations.

    The prompt, `prefix`, comes first, then definitions from `earlier` sources of names that the code uses but does not
    define.
    """
    start = parse_start(prefix, attempts=1)
    known = {*dir(builtins)}.union(*(bound_names(node) for node in (start.body if start else ())))
    parts = [_without_demonstrations(code, entry_point, {entry_point})]
    for text in reversed(earlier):
        known = known.union(*(bound_names(node) for part in parts for node in part.body))
        missing = set().union(*(_read(node) for part in parts for node in part.body)) - known
        part = parse_start(text) if missing else None
        if part and not missing.isdisjoint(set().union(*map(bound_names, part.body))):
            parts.insert(0, _without_demonstrations(part, entry_point, missing))
    text = "\n\n".join(part.text.strip("\n") for part in parts) + "\n"
    if prefix:
        return _after(prefix, text)
    # Future imports must be the first statements of a program, so they are left out after a prompt.
    return "".join(f"{ast.unparse(node)}\n" for part in parts for node in part.body if _is_future(node)) + text


def _after(prefix: str, text: str) -> str:
    """Place a program after the prompt, as in the official HumanEval harness."""
    return text if text.startswith(prefix) else f"{prefix}\n{text}"


def under_signature(body: str, entry_point: str, prefix: str) -> str | None:
    """Return a program with `body` under the prompt's signature. Return None if there is no signature or valid body.

    The body may have any indentation, and its first line may lack it.
    """
    start = parse_start(prefix, attempts=1)
    stub = start and _function(start, entry_point)
    if not stub:
        return None
    indent = " " * stub.body[0].col_offset
    body = body.strip("\n")
    first, _, rest = body.partition("\n")
    candidates = [body] if body[:1] in (" ", "\t") else []
    candidates += [textwrap.indent(textwrap.dedent(body), indent), f"{indent}{first.lstrip()}\n{rest}"]
    for candidate in candidates:
        code = parse_start(f"{prefix.rstrip()}\n{candidate}")
        function = code and _function(code, entry_point)
        if code and function and len(function.body) > len(stub.body):
            return assemble(code, entry_point)
    return None


def bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds in the module."""
    if isinstance(statement, ast.ClassDef):
        return {statement.name}
    bound: set[str] = set()
    nodes: list[ast.AST] = [statement]
    while nodes:
        node = nodes.pop()
        if isinstance(node, _FUNCTIONS):  # Their bodies do not run.
            nodes += [node.args, *getattr(node, "decorator_list", [])]
        else:
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        else:  # Functions, classes, `except ... as name`, and the patterns of `match`.
            bound.add(getattr(node, "name", None) or "")
    return bound - {""}


def _function(code: Code, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for node in reversed(code.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return node
    return None


def _read(statement: ast.AST) -> set[str]:
    """Return the names of the module that a statement reads, at once or in the functions that it defines.

    These include the attributes and the statements in `_DEMONSTRATION`.
    """
    read: set[str] = set()
    stored: set[str] = set()
    shared: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            (stored if isinstance(node.ctx, ast.Store) else read).add(node.id)
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
        elif isinstance(node, ast.Global):
            shared.update(node.names)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read.add(node.target.id)
        elif isinstance(node, ast.Attribute):
            read |= {node.attr} & _DEMONSTRATION
        elif isinstance(node, ast.Assert):
            read.add("assert")
    is_function = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
    return read - (stored - shared) if is_function else read


def _without_demonstrations(code: Code, entry_point: str, wanted: Collection[str]) -> Code:
    """Drop demonstrations, except those that the wanted names need.

    A demonstration is a statement that calls the entry point, prints, asserts, or reads input, itself or through names
    that other demonstrations bind. A name needs the statements that bind it, and the names that those read.

    Future imports must come first in the program, so they remain only in the returned statements, not in the text.
    """
    reads = [*map(_read, code.body)]
    binds = [*map(bound_names, code.body)]
    shown = {entry_point, *_DEMONSTRATION}
    demonstrations = []
    for node, read in zip(code.body, reads, strict=True):
        sets_part = isinstance(getattr(node, "targets", [None])[0], (ast.Attribute, ast.Subscript))  # `f.cache = {}`
        if read & shown and not sets_part:  # It may be a function that demonstrates, such as `main` or `test_f`.
            shown |= bound_names(node) - {entry_point}
            demonstrations += [] if isinstance(node, _DEFINITIONS) else [node]
    needed: set[str] = {*wanted}
    size = 0
    while len(needed) > size:
        size = len(needed)
        needed = needed.union(*(read for read, names in zip(reads, binds, strict=True) if names & needed))
    is_needed = {node: bool(names & needed) for node, names in zip(code.body, binds, strict=True)}
    for node in demonstrations:  # Names bound in `if __name__ == "__main__"` are never needed.
        is_needed[node] &= not (isinstance(node, ast.If) and "__name__" in _read(node.test))
    gone = [node for node in demonstrations if not is_needed[node]]
    future = [node for node in code.body if _is_future(node)]
    return Code(_without(code, [*gone, *future]).text, [node for node in code.body if node not in gone])


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _without(code: Code, statements: Collection[ast.stmt]) -> Code:
    """Return the code without these statements, except those that share a line with others."""
    body = [node for node in code.body if node not in statements]
    gone = {line for node in statements for line in _lines(node)} - {line for node in body for line in _lines(node)}
    lines = [line for number, line in enumerate(code.text.split("\n"), 1) if number not in gone]
    return Code("\n".join(lines), body)


def _lines(statement: ast.stmt) -> range:
    first = min(node.lineno for node in [statement, *getattr(statement, "decorator_list", [])])
    return range(first, (statement.end_lineno or first) + 1)
