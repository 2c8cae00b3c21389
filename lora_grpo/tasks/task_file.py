"""A task of your own in one Python file: `--task my_task.py`.

The file defines:

    load(split)               rows, as dictionaries; the split is "train" or "eval"

one of

    check(completion, row)    True or False, a score from 0 to 1, or a `Verdict`; it gets what follows the thoughts
    Environment               a class, for conversations and tools; see environment.py
    agent(row, base_url)      a function that calls the model at an address, as often as it likes; returns a score
    AGENT                     the same as a command, such as ("uv", "run", "agent.py"); docs/agents.md has its protocol

(each function and method may be `async`; the calls of an `async` check run at the same time)

and, optionally, any of these:

    prompt(row)               the question, or a list of chat messages; default: the row's "question" or "prompt"
    gold(row)                 a completion that `check` must accept; with an Environment, a list of messages
    teacher_prompt(row)       the prompt that a teacher reads (--teacher), with more in it than the model's, such as the
                              reference answer or a hint: a text or messages; default: the model's prompt
    load(split, source)       instead of load(split), to read the file or dataset given with --data.train or --data.eval
    SYSTEM_PROMPT             the system message; default: none
    REWARDS                   the default of --rewards, with files beside this one; if not defined:
                              ("correct_answer=1.0",)
    SFT_PRESETS               settings of the SFT before GRPO, by preset: {"laptop": {"train": {"max_steps": 5}}}
    THRESHOLD                 the minimum score of a correct completion; default: 1.0
    AUDIT_IGNORE              attacks that the audit skips, such as ("wrong value",); default: none
    MAX_TURNS                 of the model in a conversation, 1 or more; default: 8
    RAISE_ERRORS              whether an exception in a tool stops the run; by default, the model reads it
    SEES_THOUGHTS             whether `check` and `reply` get the whole text, with the model's thoughts; default: False
    SECONDS_PER_CALL          time limit of each call of the Environment, default: 10; or of an agent's work between two
                              answers of the model, default: 60; 0 for none
    SECONDS_PER_EPISODE       time limit of an agent's work in an episode; 0 for none; default: 600
    PROMPT_TOKENS             maximum number of tokens of an agent's first prompt; default: 512
    PROCESSES                 how many processes of AGENT run at the same time; default: 8
    EPISODES_PER_PROCESS      how many rows each of them gets at once, to play them side by side; default: 1
    MAX_FAILED                fraction of episodes whose agent may fail before the run ends; default: 0.1
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
from lora_grpo.tasks.agent_definition import AgentDefinition
from lora_grpo.tasks.columns import check_names, is_id, loaded_columns, without_row_entries
from lora_grpo.tasks.environment import Constants, EnvironmentClass, Session
from lora_grpo.tasks.task import Task

_SECONDS_PER_CALL_OF_AGENT = 60.0

_GOLD_ROLES = ("assistant", "user", "tool")
"""Of a reference conversation. Only the assistant's messages are read; the environment makes the others."""


@dataclass(frozen=True)
class TaskFile(Task):
    """The task that a file defines, or a module of this package in the form of such a file."""

    path: Path
    """The file, for error messages."""
    module: Any
    """The imported file, or an object with the same functions."""
    constants: Constants
    """The file's constants, with the defaults of those that it does not define."""

    @functools.cached_property
    def environment(self) -> EnvironmentClass | None:
        """The file's `Environment`, or None if it defines `check`."""
        python_class = getattr(self.module, "Environment", None)
        if python_class is None:
            return None
        return EnvironmentClass(self.path, python_class, self.constants)

    @functools.cached_property
    def agent(self) -> AgentDefinition | None:
        """The file's agent, or None if it defines `check` or an `Environment`."""
        command = getattr(self.module, "AGENT", ())
        if not command and not hasattr(self.module, "agent"):
            return None
        constants = self.constants
        seconds_per_call = constants.SECONDS_PER_CALL
        if not hasattr(self.module, "SECONDS_PER_CALL"):
            seconds_per_call = _SECONDS_PER_CALL_OF_AGENT
        return AgentDefinition(
            path=self.path,
            command=tuple(command),
            processes=constants.PROCESSES,
            episodes_per_process=constants.EPISODES_PER_PROCESS,
            seconds_per_call=seconds_per_call,
            seconds_per_episode=constants.SECONDS_PER_EPISODE,
            max_failed=constants.MAX_FAILED,
            threshold=constants.THRESHOLD,
            prompt_tokens=constants.PROMPT_TOKENS,
        )

    @property
    def has_gold(self) -> bool:
        return hasattr(self.module, "gold") and self.agent is None

    @property
    def has_own_prompts(self) -> bool:
        return True

    @property
    def has_teacher_prompt(self) -> bool:
        return hasattr(self.module, "teacher_prompt")

    @property
    def grading(self) -> str:
        """Names the grader, which a reader finds in the file."""
        grader = "check"
        if self.environment:
            grader = "Environment"
        elif self.agent:
            grader = "AGENT" if self.agent.command else "agent"
        return f"`{grader}` in {self.path.name}"

    @property
    def takes_source(self) -> bool:
        """Whether `load` reads `--data.train` and `--data.eval`."""
        return "source" in inspect.signature(self.module.load).parameters

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        """Return the rows of a split, each with `id`, `question`, `answer` and `prompt`. `columns` is not used."""
        if source is not None and not self.takes_source:
            raise UserError(f"{self.path}: load(split) takes no source, got {source!r}; define load(split, source)")
        arguments = [split, source] if self.takes_source else [split]
        returned = self._call(self.module, "load", *arguments)

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
        if self.agent:
            raise UserError(f"{self.path}: its agent grades episodes while they take place, not texts")
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
                    f"result ({', '.join(sorted(RESULT_ENTRIES))}); {_row_and_completion(completion, row)}"
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
                return self.module.check(answer, _copied_columns(row))
        except (Exception, SystemExit) as error:
            raise self._check_failed(error, completion, row) from error

    def _check_failed(self, error: BaseException, completion: str, row: Mapping[str, Any]) -> CheckError:
        line = python_file.line_of(error, self.path)
        return CheckError(
            f"{line}: check raised {type(error).__name__}: {first_line(error)}; {_row_and_completion(completion, row)}"
        )

    def gold(self, row: Mapping[str, Any]) -> Any:
        """Return the row's reference completion, or the messages of the model in its reference conversation."""
        gold = self._call(self.module, "gold", _copied_columns(row))
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

    def teacher_prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages that a teacher reads in place of the row's prompt: what `teacher_prompt(row)` returns.

        A text is the user's message. Messages without a system message follow that of the row's prompt. The text of
        `reset` is added as to the row's prompt. If the row's prompt has begun the answer, so do these messages.
        """
        where = f"{self.path}: teacher_prompt of row {row['id']}"
        asked = self._call(self.module, "teacher_prompt", _copied_columns(row))
        if isinstance(asked, str):
            asked = [{"role": "user", "content": asked}]
        if not isinstance(asked, (list, tuple)) or not asked:
            raise UserError(f"{where} returned {asked!r:.60}; expected a text or a list of messages")
        messages = checked_messages(asked, where)
        check_asks(messages, where)
        first_message = row["prompt"][0]
        if first_message["role"] == "system" and messages[0]["role"] != "system":
            messages = [first_message, *messages]
        messages = _with_reset_text(messages, row.get("reset_text", ""))
        last_message = row["prompt"][-1]
        if last_message["role"] == "assistant" and messages[-1]["role"] != "assistant":
            messages = [*messages, last_message]
        return messages

    def with_opening(self, row: Row) -> Row:
        """Return a row whose prompt contains what the environment adds: the text of `reset`, and the tools.

        Raises:
            CheckError: `reset` raised an exception.
            UserError: a tool has no types or no docstring, or `tools_of` returned something else than JSON schemas.
        """
        if self.environment is None:
            return row

        text = Session(self.environment, _copied_columns(row)).opening
        prompt = _with_reset_text(row["prompt"], text)
        if not _last_question(prompt)["content"].strip():
            raise UserError(f"{self.path}: row {row['id']} has no question, and reset returned no text")

        python_class = self.environment.python_class
        if hasattr(python_class, "tools_of"):
            tools = self._call(python_class, "tools_of", _copied_columns(row))
            if not _are_schemas(tools):
                raise UserError(
                    f"{self.path}: tools_of returned {tools!r:.60} for row {row['id']}; expected JSON schemas, "
                    "as in [{'type': 'function', 'function': {'name': 'look_up', 'parameters': {...}}}]"
                )
        else:
            tools = self.environment.schemas
        return {**row, "question": row["question"] + text, "prompt": prompt, "reset_text": text, "tools": tools}

    def _row(self, columns: dict[str, Any], split: str, index: int) -> Row:
        """Return the row with these columns, which `load` has returned. Its `loaded_row` keeps them as they are."""
        row_id = f"{self.path.stem}/{split}/{index}"
        if is_id(columns.get("id")):
            row_id = str(columns["id"])
        where = f"{self.path}: row {row_id}"
        check_names(columns, where)
        for name, value in columns.items():
            _check_json(value, f"{where}: the column {name!r}")

        messages = self._messages(columns, where)
        if not self.environment:  # with an Environment, the question may come from `reset`
            check_asks(messages, f"{where}: its prompt")
        _check_json(messages, f"{where}: its prompt")
        question = "\n".join(message["content"] for message in messages if message["role"] != "system")
        system_prompt = self.constants.SYSTEM_PROMPT
        if system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]

        # The functions of the file get `loaded_row`, with the `id` that `load` returned, which may be a number. The row
        # itself has an `id` that is always a text, and an answer: in `loaded_row`, an answer of "" that `load` has not
        # returned would hide that the column is missing, and a `check` that compares with it would accept "".
        loaded_row = {"id": row_id, "question": question, **columns}
        agent_entries: dict[str, Any] = {}
        if self.agent:
            agent_entries["prompt_tokens"] = self.agent.prompt_tokens
        return {
            "answer": "",
            **without_row_entries(loaded_row),  # without `id`, `question` and other entries of lora_grpo's own
            "id": row_id,
            "question": question,
            "prompt": messages,
            "loaded_row": loaded_row,
            **agent_entries,
        }

    def _messages(self, columns: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """Return the messages that ask the question: from `prompt(row)`, or from the column `prompt` or `question`."""
        question = columns.get("question")
        prompt = columns.get("prompt")
        # `asked` is a text or a list of messages, and `origin` says where it is from, for errors.
        if hasattr(self.module, "prompt"):
            asked = self._call(self.module, "prompt", copy.deepcopy(columns))
            origin = "what prompt(row) returned"
        elif isinstance(prompt, (list, tuple)):
            asked = prompt
            origin = "prompt"
        else:
            if question is not None and prompt not in (None, question):
                raise UserError(
                    f"{where} has a question and another text as 'prompt'; define prompt(row) to choose what is asked"
                )
            asked = prompt if question is None else question
            origin = "question"

        if self.environment and asked is None:  # the question may come from `reset`
            asked = ""
        if self.agent and asked is None:  # the agent asks; this is how the row is shown
            asked = json.dumps(columns, ensure_ascii=False)
        if isinstance(asked, str) and (asked.strip() or self.environment):
            return [{"role": "user", "content": asked}]
        if not isinstance(asked, (list, tuple)) or not asked:
            raise UserError(
                f"{where} asks {asked!r:.60}; expected a text or messages from prompt(row), or a 'question' in the row"
            )
        return checked_messages(asked, f"{where}: {origin}")

    def _call(self, owner: Any, name: str, *arguments: Any) -> Any:
        """Return the result of a function of the file, or of a static method of its Environment."""
        try:
            with python_file.keeping_directory():
                return asynchronous.finished(getattr(owner, name)(*arguments))
        except UserError:  # of `read_rows`
            raise
        except (Exception, SystemExit) as error:
            line = python_file.line_of(error, self.path)
            raise UserError(f"{line}: {name} raised {type(error).__name__}: {first_line(error)}") from error


def _copied_columns(row: Mapping[str, Any]) -> Any:
    """Return a copy of the columns that `load` returned, so that a function of the file cannot change the row."""
    return copy.deepcopy(loaded_columns(row))


def _with_reset_text(prompt: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return a prompt with the text of `reset` after its last question."""
    question = _last_question(prompt)
    return [{**message, "content": message["content"] + text} if message is question else message for message in prompt]


def _last_question(prompt: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last message of a prompt, or the one before it if that is the beginning of the model's answer."""
    begins_answer = len(prompt) > 1 and prompt[-1]["role"] == "assistant"
    return prompt[-2] if begins_answer else prompt[-1]


def _are_schemas(tools: Any) -> bool:
    """Return whether a value is a list of functions as chat templates take them."""
    if not isinstance(tools, list):
        return False
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return False
    return True


def _check_json(value: Any, description: str) -> None:
    """Raise UserError unless a value can be written as JSON. Rows are compared by their JSON."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False, sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{description} is not JSON: {first_line(error)}; keep plain values") from None


def _row_and_completion(completion: str, row: Mapping[str, Any]) -> str:
    return f"row {row.get('id')}, completion {completion!r:.200}"


def load_task_file(name: str) -> TaskFile:
    """Import a task file, once per process.

    Raises:
        UserError: the file cannot be read or imported, lacks `load` or a grader, or a constant has the wrong type.
    """
    path = Path(name).expanduser().resolve()
    expected = "a task file with load(split), and check(completion, row), a class Environment or agent(row, base_url)"
    return _checked_task(path, python_file.load(path, expected), expected)


def of_object(name: str, value: Any) -> TaskFile:
    """Return the task of a Python object with the functions and constants of a task file. A class is instantiated.

    Raises:
        UserError: the object lacks `load` or a grader, or a constant has the wrong type.
    """
    expected = "an object with load(split), and check(completion, row) or a class Environment"
    return _checked_task(Path(name), value() if isinstance(value, type) else value, expected)


def _checked_task(path: Path, module: Any, expected: str) -> TaskFile:
    """Return the task of a module or an object, or raise UserError if it lacks something."""
    if not callable(getattr(module, "load", None)):
        raise UserError(f"{path} defines no function 'load'; expected {expected}")
    environment = getattr(module, "Environment", None)
    if environment is not None and not isinstance(environment, type):
        raise UserError(f"{path}: Environment is {environment!r:.60}; expected a class")
    command = getattr(module, "AGENT", None)
    if command is not None and not _is_command(command):
        raise UserError(f"{path}: AGENT is {command!r:.60}; expected a program and its arguments, as a list of texts")

    forms = {
        "check": callable(getattr(module, "check", None)),
        "Environment": environment is not None,
        "agent": callable(getattr(module, "agent", None)),
        "AGENT": command is not None,
    }
    defined = [name for name, is_defined in forms.items() if is_defined]
    if not defined:
        raise UserError(f"{path} defines neither check, Environment, agent nor AGENT; expected {expected}")
    if len(defined) > 1:
        raise UserError(f"{path} defines both {' and '.join(defined)}; expected {expected}")
    if hasattr(module, "teacher_prompt") and {"agent", "AGENT"} & {*defined}:
        raise UserError(f"{path} has an agent, which makes its own prompts; remove teacher_prompt")
    if "agent" in defined and not isinstance(module, ModuleType):
        raise UserError(f"{path} is an object with an agent, which runs in processes of its own; put it into a file")
    if isinstance(module, ModuleType):
        return task_of_module(path, module)
    return _with_constants(path, module)


def _is_command(command: Any) -> bool:
    is_list = isinstance(command, (list, tuple)) and bool(command)
    return is_list and all(isinstance(part, str) and part for part in command)


@functools.cache
def task_of_module(path: Path, module: ModuleType) -> TaskFile:
    """Return the task of a module with the functions of a task file, or raise UserError for a wrong constant."""
    return _with_constants(path, module)


def _with_constants(path: Path, module: Any) -> TaskFile:
    defined = {name: getattr(module, name) for name in Constants.__annotations__ if hasattr(module, name)}
    try:
        return TaskFile(path, module, TypeAdapter(Constants).validate_python(defined))
    except ValidationError as error:
        first_problem = error.errors()[0]
        name = str(first_problem["loc"][0])
        expected = first_problem["msg"].replace("Input should be", "expected")
        raise UserError(f"{path}: {name} is {defined[name]!r:.60}; {expected}") from None
