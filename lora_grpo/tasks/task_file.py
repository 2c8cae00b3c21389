"""A task of your own in one Python file: `--task my_task.py`.

The file defines:

    load(split)               rows, as dictionaries; the split is "train" or "eval"

one of

    check(completion, row)    True or False, a score from 0 to 1, or a `Verdict`; it gets what follows the thoughts
    Environment               a class, for conversations and tools; see environment.py

(each function and method may be `async`; the calls of an `async` check run at the same time)

and, optionally, any of these:

    prompt(row)               the question, or a list of chat messages; default: the row's "question" or "prompt"
    gold(row)                 a completion that `check` must accept; with an Environment, a list of messages
    load(split, source)       instead of load(split), to read the file or dataset given with --data.train or --data.eval
    SYSTEM_PROMPT             the system message; default: none
    REWARDS                   the default of --rewards, with files beside this one; if not defined:
                              ("correct_answer=1.0",)
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lora_grpo import asynchronous
from lora_grpo.errors import UserError, first_line
from lora_grpo.files import python_file
from lora_grpo.grading import RESULT_ENTRIES, CheckError, Row, Verdict, as_verdict
from lora_grpo.prompts import check_asks, checked_messages, thoughts
from lora_grpo.tasks import sources
from lora_grpo.tasks.columns import check_names, is_id, own_columns
from lora_grpo.tasks.environment import Constants, EnvironmentClass, Session

_GOLD_ROLES = ("assistant", "user", "tool")
"""Of a reference conversation. Only the assistant's messages are read; the environment makes the others."""


@dataclass(frozen=True)
class TaskFile:
    """The `Task` that a file defines, or a module of this package in the form of such a file."""

    path: Path
    module: Any
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
        """Return the result of the file's `check` as a verdict. See `check_many`."""
        [verdict] = self.check_many([completion], [row])
        return verdict

    def check_many(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """Return the results of the file's `check` for B completions of B rows. If it is `async`, all run together.

        Unless the file sets `SEES_THOUGHTS`, `check` gets what follows the model's thoughts, and it is not called for
        a thought that is not closed.

        Raises:
            CheckError: `check` raised an exception, or returned a value that is neither a score nor a verdict.
        """
        if self.environment:
            raise UserError(f"{self.path}: its Environment grades conversations while they take place, not texts")
        returned = [self._start_check(completion, row) for completion, row in zip(completions, rows, strict=True)]
        with python_file.keeping_directory():
            results = asynchronous.finished_together(returned)
        verdicts = []
        for completion, row, result in zip(completions, rows, results, strict=True):
            if isinstance(result, BaseException):
                raise self._check_failed(result, completion, row) from result
            verdict = as_verdict(result, self.constants.THRESHOLD)
            if verdict is None:
                raise CheckError(
                    f"{self.path}: check returned {result!r:.200}; expected True, False, a score from 0 to 1, or a "
                    "Verdict with such a score, with texts as reason, and with rules of other names than those of a "
                    f"result ({', '.join(sorted(RESULT_ENTRIES))}); {_place(completion, row)}"
                )
            verdicts.append(verdict)
        return verdicts

    def _start_check(self, completion: str, row: Mapping[str, Any]) -> Any:
        """Return what the file's `check` returns, an awaitable if it is `async`; a verdict on an unfinished thought."""
        answer = completion if self.constants.SEES_THOUGHTS else thoughts.answer_of(completion)
        if answer is None:
            return Verdict(False, thoughts.UNFINISHED)
        try:
            with python_file.keeping_directory():
                return self.module.check(answer, self._given(row))
        except (Exception, SystemExit) as error:
            raise self._check_failed(error, completion, row) from error

    def _check_failed(self, error: BaseException, completion: str, row: Mapping[str, Any]) -> CheckError:
        line = python_file.line_of(error, self.path)
        what = f"{type(error).__name__}: {first_line(error)}"
        return CheckError(f"{line}: check raised {what}; {_place(completion, row)}")

    def gold(self, row: Mapping[str, Any]) -> Any:
        """Return the row's reference completion, or the messages of the model in its reference conversation."""
        gold = self._call("gold", self._given(row))
        if not self.environment:
            if not isinstance(gold, str):
                raise UserError(f"{self.path}: gold returned {gold!r:.60} for row {row['id']}; expected a text")
            return gold
        if not isinstance(gold, (list, tuple)) or not gold:
            raise UserError(
                f"{self.path}: gold returned {gold!r:.60} for row {row['id']}; expected a list of messages with the "
                f"roles {', '.join(_GOLD_ROLES)}"
            )
        messages = checked_messages(gold, f"{self.path}: gold of row {row['id']}", _GOLD_ROLES)
        return [message for message in messages if message["role"] == "assistant"]

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
        """Return the row of the columns that `load` has returned, which stay as they are in `loaded_row`."""
        name = f"{self.path.stem}/{split}/{index}"
        if is_id(row.get("id")):
            name = str(row["id"])
        where = f"{self.path}: row {name}"
        check_names(row, where)
        for column, value in row.items():
            _check_json(value, f"{where}: the column {column!r}")
        messages = self._messages(row, where)
        if not self.environment:  # whose `reset` may ask
            check_asks(messages, f"{where}: its prompt")
        _check_json(messages, f"{where}: its prompt")

        question = "\n".join(message["content"] for message in messages if message["role"] != "system")
        loaded = {"id": name, "question": question, "answer": "", **row}
        system = self.constants.SYSTEM_PROMPT
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return {**own_columns(loaded), "id": name, "question": question, "prompt": messages, "loaded_row": loaded}

    def _messages(self, row: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """Return the messages that a row asks: those of `prompt(row)`, or of its columns `question` or `prompt`."""
        if hasattr(self.module, "prompt"):
            asked, place = self._call("prompt", copy.deepcopy(row)), "what prompt(row) returned"
        elif isinstance(row.get("prompt"), (list, tuple)):
            asked, place = row["prompt"], "prompt"
        else:
            question, text = row.get("question"), row.get("prompt")
            if question is not None and text not in (None, question):
                raise UserError(
                    f"{where} has a question and another text as 'prompt'; define prompt(row) to choose what is asked"
                )
            asked, place = text if question is None else question, "question"
        if self.environment and asked is None:  # `reset` may ask
            asked = ""
        if isinstance(asked, str) and (asked.strip() or self.environment):
            return [{"role": "user", "content": asked}]
        if not isinstance(asked, (list, tuple)) or not asked:
            raise UserError(
                f"{where} asks {asked!r:.60}; expected a text or messages from prompt(row), or a 'question' in the row"
            )
        return checked_messages(asked, f"{where}: {place}")

    def _given(self, row: Mapping[str, Any]) -> Any:
        """Return a copy of the row as `load` returned it, so that a function of the file cannot change it."""
        return copy.deepcopy(row.get("loaded_row", dict(row)))

    def _call(self, name: str, *arguments: Any, of: Any = None) -> Any:
        try:
            with python_file.keeping_directory():
                return asynchronous.finished(getattr(of or self.module, name)(*arguments))
        except UserError:  # of `read_rows`
            raise
        except (Exception, SystemExit) as error:
            line = python_file.line_of(error, self.path)
            raise UserError(f"{line}: {name} raised {type(error).__name__}: {first_line(error)}") from error


def _check_json(value: Any, what: str) -> None:
    """Raise UserError unless a value can be written as JSON, as rows are compared by it."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False, sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{what} is not JSON: {first_line(error)}; keep plain values") from None


def _place(completion: str, row: Mapping[str, Any]) -> str:
    return f"row {row.get('id')}, completion {completion!r:.200}"


def read(name: str) -> TaskFile:
    """Import a task file, once per process.

    Raises:
        UserError: the file cannot be read or imported, lacks `load` or a grader, or a constant has the wrong type.
    """
    path = Path(name).expanduser().resolve()
    expected = "a task file with load(split), and check(completion, row) or a class Environment"
    return _checked(path, python_file.load(path, expected), expected)


def of_object(name: str, value: Any) -> TaskFile:
    """Return the task of a Python object with the functions and constants of a task file. A class is instantiated.

    Raises:
        UserError: the object lacks `load` or a grader, or a constant has the wrong type.
    """
    expected = "an object with load(split), and check(completion, row) or a class Environment"
    return _checked(Path(name), value() if isinstance(value, type) else value, expected)


def _checked(path: Path, module: Any, expected: str) -> TaskFile:
    """Return the task of a module or an object, or raise UserError if it lacks something."""
    if not callable(getattr(module, "load", None)):
        raise UserError(f"{path} defines no function 'load'; expected {expected}")
    kind = getattr(module, "Environment", None)
    if kind is not None and not isinstance(kind, type):
        raise UserError(f"{path}: Environment is {kind!r:.60}; expected a class")
    if callable(getattr(module, "check", None)) == (kind is not None):
        found = "both check and Environment" if kind else "neither check nor Environment"
        raise UserError(f"{path} defines {found}; expected {expected}")
    if not isinstance(module, ModuleType):
        return _with_constants(path, module)
    return of_module(path, module)


@functools.cache
def of_module(path: Path, module: ModuleType) -> TaskFile:
    """Return the task of a module with the functions of a task file, or raise UserError for a wrong constant."""
    return _with_constants(path, module)


def _with_constants(path: Path, module: Any) -> TaskFile:
    given = {name: getattr(module, name) for name in Constants.__annotations__ if hasattr(module, name)}
    try:
        return TaskFile(path, module, TypeAdapter(Constants).validate_python(given))
    except ValidationError as errors:
        error = errors.errors()[0]
    name = str(error["loc"][0])
    raise UserError(f"{path}: {name} is {given[name]!r:.60}; {error['msg'].replace('Input should be', 'expected')}")
