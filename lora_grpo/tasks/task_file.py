"""A task of your own in one Python file: `--task my_task.py`.

The file defines:

    load(split)               rows, as dictionaries; the split is "train" or "eval"

one of

    check(completion, row)    True or False, a score from 0 to 1, or a `Verdict`; it gets what follows the thoughts
    Environment               a class, for conversations and tools; see environment.py

and, optionally, any of these:

    prompt(row)               the question, or a list of chat messages; default: the row's "question" or "prompt"
    gold(row)                 a completion that `check` must accept; with an Environment, a list of messages
    load(split, source)       instead of load(split), to read the file or dataset given with --data.train or --data.eval
    SYSTEM_PROMPT             the system message; default: none
    REWARDS                   the default of --rewards; if not defined: ("correct_answer=1.0",)
    THRESHOLD                 the minimum score of a correct completion; default: 1.0
    AUDIT_IGNORE              attacks that the audit skips, such as ("wrong value",); default: none
    MAX_TURNS                 of the model in a conversation, 1 or more; default: 8
    RAISE_ERRORS              whether an exception in a tool stops the run; by default, the model reads it
    SEES_THOUGHTS             whether `check` and `reply` get the whole text, with the model's thoughts; default: False
    SECONDS_PER_CALL          time limit of each call of the Environment; 0 for none; default: 10
"""

import copy
import functools
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lora_grpo.errors import UserError, first_line
from lora_grpo.files import python_file
from lora_grpo.tasks import sources, thoughts
from lora_grpo.tasks.environment import Constants, EnvironmentClass, Session
from lora_grpo.tasks.registry import RESERVED_COLUMNS, CheckError, Row, Verdict, as_verdict

_ROLES = ("assistant", "user", "tool")
"""Of messages. Of a reference conversation, only the assistant's are read; the environment makes the others."""


@dataclass(frozen=True)
class TaskFile:
    """The `Task` that a file defines, or a module of this package in the form of such a file."""

    path: Path
    module: ModuleType
    constants: Constants

    @functools.cached_property
    def environment(self) -> EnvironmentClass | None:
        """The file's `Environment`, or None if it defines `check`."""
        kind = getattr(self.module, "Environment", None)
        return kind and EnvironmentClass(self.path, kind, self.constants)

    @property
    def has_gold(self) -> bool:
        return hasattr(self.module, "gold")

    @property
    def takes_source(self) -> bool:
        """Whether `load` reads `--data.train` and `--data.eval`."""
        return "source" in inspect.signature(self.module.load).parameters

    def load(self, split: str, source: str | None = None) -> list[Row]:
        """Return the rows of a split, each with `id`, `question`, `answer` and `prompt`."""
        if source is not None and not self.takes_source:
            raise UserError(f"{self.path}: load(split) takes no source, got {source!r}; define load(split, source)")
        returned = self._call("load", split, *([source] if self.takes_source else []))
        rows = list(returned) if isinstance(returned, Iterable) else []
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise UserError(f"{self.path}: load({split!r}) returned {returned!r:.60}; expected a list of dictionaries")
        loaded = [self._row(dict(row), split, index) for index, row in enumerate(rows)]
        return sources.unique(loaded, str(self.path))

    def check(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Return the result of the file's `check` as a verdict.

        Unless the file sets `SEES_THOUGHTS`, `check` gets what follows the model's thoughts, and it is not called for
        a thought that is not closed.

        Raises:
            CheckError: `check` raised an exception, or returned a value that is neither a score nor a verdict.
        """
        if self.environment:
            raise UserError(f"{self.path}: its Environment grades conversations while they take place, not texts")
        where = f"row {row.get('id')}, completion {completion!r:.200}"
        answer = completion if self.constants.SEES_THOUGHTS else thoughts.answer_of(completion)
        if answer is None:
            return Verdict(False, thoughts.UNFINISHED)
        try:
            with python_file.keeping_directory():
                found = self.module.check(answer, self._given(row))
        except (Exception, SystemExit) as error:
            line = python_file.line_of(error, self.path)
            raise CheckError(f"{line}: check raised {type(error).__name__}: {first_line(error)}; {where}") from error
        verdict = as_verdict(found, self.constants.THRESHOLD)
        if verdict is None:
            raise CheckError(
                f"{self.path}: check returned {found!r:.200}; expected True, False, a score from 0 to 1, or a Verdict "
                f"with such a score; {where}"
            )
        return verdict

    def gold(self, row: Mapping[str, Any]) -> Any:
        """Return the row's reference completion, or the messages of the model in its reference conversation."""
        gold = self._call("gold", self._given(row))
        if not self.environment:
            if not isinstance(gold, str):
                raise UserError(f"{self.path}: gold returned {gold!r:.60} for row {row['id']}; expected a text")
            return gold
        messages = list(gold) if isinstance(gold, (list, tuple)) else []
        if not messages or not all(
            isinstance(each, dict) and each.get("role") in _ROLES and isinstance(each.get("content") or "", str)
            for each in messages
        ):
            raise UserError(
                f"{self.path}: gold returned {gold!r:.60} for row {row['id']}; expected a list of messages with the "
                f"roles {', '.join(_ROLES)}"
            )
        own = (message for message in messages if message["role"] == "assistant")
        return [{**message, "content": message.get("content") or ""} for message in own]

    def open(self, row: Row) -> Row:
        """Return a row whose prompt contains what the environment adds: the text of `reset`, and the tools.

        Raises:
            CheckError: `reset` raised an exception.
            UserError: a tool has no types or no docstring.
        """
        if self.environment is None:
            return row
        text = Session(self.environment, self._given(row)).opening
        prompt = list(row["prompt"])
        asked = len(prompt) - 1
        if prompt[asked]["role"] == "assistant":  # the model continues it
            asked -= 1
        prompt[asked] = {**prompt[asked], "content": prompt[asked]["content"] + text}
        if not prompt[asked]["content"].strip():
            raise UserError(f"{self.path}: row {row['id']} has no question, and reset returned no text")
        question = row["question"] + text
        own = hasattr(self.environment.kind, "tools_of")
        tools = self._call("tools_of", self._given(row), of=self.environment.kind) if own else self.environment.schemas
        return {**row, "question": question, "prompt": prompt, "reset_text": text, "tools": tools}

    def _row(self, row: dict[str, Any], split: str, index: int) -> Row:
        name = str(row.get("id") or f"{self.path.stem}/{split}/{index}")
        asked: Any = row.get("question", row.get("prompt"))
        if hasattr(self.module, "prompt"):
            asked = self._call("prompt", row)
        if self.environment and asked is None:  # `reset` may ask
            asked = ""
        if isinstance(asked, str) and (asked.strip() or self.environment):
            asked = [{"role": "user", "content": asked}]
        parts = asked if isinstance(asked, (list, tuple)) and asked else [None]
        if not all(
            isinstance(part, dict) and isinstance(part.get("content"), str) and part.get("role") in ("system", *_ROLES)
            for part in parts
        ):
            raise UserError(
                f"{self.path}: row {name} asks {asked!r:.60}; expected a text or messages from prompt(row), or a "
                "'question' in the row"
            )
        if reserved := sorted(RESERVED_COLUMNS & row.keys()):
            raise UserError(f"{self.path}: row {name} has a column {reserved[0]!r}, which the trainer uses; rename it")
        system = self.constants.SYSTEM_PROMPT
        messages = [{"role": "system", "content": system}] if system and asked[0]["role"] != "system" else []
        question = "\n".join(message["content"] for message in asked if message["role"] != "system")
        given = {"question": question, "answer": "", **row, "id": name}
        try:
            json.dumps({**given, "prompt": asked}, allow_nan=False, ensure_ascii=False, sort_keys=True).encode()
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.path}: row {name} is not JSON: {first_line(error)}; keep plain values") from None
        return {**given, "question": question, "prompt": [*messages, *asked], "loaded_row": given}

    def _given(self, row: Mapping[str, Any]) -> Any:
        """Return a copy of the row as `load` returned it, so that a function of the file cannot change it."""
        return copy.deepcopy(row.get("loaded_row", dict(row)))

    def _call(self, name: str, *arguments: Any, of: Any = None) -> Any:
        try:
            with python_file.keeping_directory():
                return getattr(of or self.module, name)(*arguments)
        except UserError:  # of `read_rows`
            raise
        except (Exception, SystemExit) as error:
            line = python_file.line_of(error, self.path)
            raise UserError(f"{line}: {name} raised {type(error).__name__}: {first_line(error)}") from error


def read(name: str) -> TaskFile:
    """Import a task file, once per process.

    Raises:
        UserError: the file cannot be read or imported, lacks `load` or a grader, or a constant has the wrong type.
    """
    path = Path(name).expanduser().resolve()
    expected = "a task file with load(split), and check(completion, row) or a class Environment"
    module = python_file.load(path, expected)
    if not callable(getattr(module, "load", None)):
        raise UserError(f"{path} defines no function 'load'; expected {expected}")
    kind = getattr(module, "Environment", None)
    if kind is not None and not isinstance(kind, type):
        raise UserError(f"{path}: Environment is {kind!r:.60}; expected a class")
    if callable(getattr(module, "check", None)) == (kind is not None):
        found = "both check and Environment" if kind else "neither check nor Environment"
        raise UserError(f"{path} defines {found}; expected {expected}")
    return of_module(path, module)


@functools.cache
def of_module(path: Path, module: ModuleType) -> TaskFile:
    """Return the task of a module with the functions of a task file, or raise UserError for a wrong constant."""
    given = {name: getattr(module, name) for name in Constants.__annotations__ if hasattr(module, name)}
    try:
        return TaskFile(path, module, TypeAdapter(Constants).validate_python(given))
    except ValidationError as errors:
        error = errors.errors()[0]
    name = str(error["loc"][0])
    raise UserError(f"{path}: {name} is {given[name]!r:.60}; {error['msg'].replace('Input should be', 'expected')}")
