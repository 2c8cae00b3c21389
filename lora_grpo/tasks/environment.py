"""The `Environment` class of a task file: tools that the model calls, a user who replies, and the reward.

The contract is that of TRL's `environment_factory`, with the addition of `reply`:

    reset(**row)       called first, with the row's columns; text that it returns is added to the question
    public methods     tools, with type hints and a Google-style docstring
    reply(text)        optional: the next user message after a turn without a tool call; None ends the conversation.
                       The text is what follows the model's thoughts, "" if a thought is not closed (`SEES_THOUGHTS`)
    take_calls(calls)  optional: gets all calls of a turn, so that no tool is run. It returns a text for each call, or
                       None to end the conversation
    tools_of(row)      optional static method: JSON schemas of the tools of a row, if they are not the public methods
    call_tool(name, arguments)
                       optional, with tools_of: called for its tools that are no public methods; returns the result
    get_reward()       called last: True, False, a number from 0 to 1, or a `Verdict`

Each conversation has an instance of its own. `reset` must return the same text for the same row, because the
conversations of a group start from the same prompt.
"""

import asyncio
import contextlib
import copy
import functools
import inspect
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveInt, PydanticUserError

from lora_grpo import asynchronous
from lora_grpo.errors import UserError, first_line, suggestion
from lora_grpo.files import python_file
from lora_grpo.grading import CheckError, Verdict, as_verdict
from lora_grpo.prompts import thoughts
from lora_grpo.tasks.tool_arguments import Tool, WrongArguments

_CONTRACT = ("reset", "reply", "take_calls", "tools_of", "call_tool", "get_reward")
"""Public methods that are not tools."""


class _TimeLimit(BaseException):
    """Not an Exception, so that a tool does not catch it."""


_FAILURES = (Exception, SystemExit, asyncio.CancelledError, _TimeLimit)
"""What a user's method may raise. Ctrl-C is not among them."""


@dataclass(frozen=True)
class Constants:
    """The constants of a task file, which `task_file` describes."""

    SYSTEM_PROMPT: str | None = None
    REWARDS: tuple[str, ...] = ("correct_answer=1.0",)
    THRESHOLD: Annotated[float, Field(ge=0, le=1)] = 1.0
    AUDIT_IGNORE: tuple[str, ...] = ()
    MAX_TURNS: PositiveInt = 8
    RAISE_ERRORS: bool = False
    SEES_THOUGHTS: bool = False
    SECONDS_PER_CALL: NonNegativeFloat = 10.0
    """Code in C, such as a query, is stopped only when it returns."""
    SECONDS_PER_EPISODE: NonNegativeFloat = 600.0
    PROMPT_TOKENS: PositiveInt = 512
    PROCESSES: PositiveInt = 8
    EPISODES_PER_PROCESS: PositiveInt = 1
    MAX_FAILED: Annotated[float, Field(ge=0, le=1)] = 0.1


@dataclass(frozen=True)
class EnvironmentClass:
    """The class `Environment` of a task file."""

    path: Path
    """The task file, for error messages."""
    python_class: Any
    """The class itself."""
    constants: Constants

    def __post_init__(self) -> None:
        for method in ("reset", "get_reward"):
            if not callable(getattr(self.python_class, method, None)):
                raise UserError(f"{self.path}: Environment has no method {method!r}; expected reset and get_reward")
        for name in Constants.__annotations__:
            if hasattr(self.python_class, name):
                raise UserError(f"{self.path}: {name} is in the class; define it at the top level of the file")
        if self.has("call_tool") and not self.has("tools_of"):
            raise UserError(f"{self.path}: Environment has call_tool without tools_of(row), which returns JSON schemas")
        takes_calls = bool(self.tools) or self.has("call_tool") or self.has("take_calls")
        if not takes_calls and not self.has("reply"):
            raise UserError(f"{self.path}: Environment has neither tools nor reply(text), so no turn can follow")

    def has(self, method: str) -> bool:
        """Return whether it has a method of the contract that is optional."""
        return callable(getattr(self.python_class, method, None))

    @functools.cached_property
    def tools(self) -> dict[str, Tool]:
        """The tools by name: the public methods that are not part of the contract."""
        tools = {}
        for name, method in inspect.getmembers(self.python_class, callable):
            if name.startswith("_") or name in _CONTRACT:
                continue
            if not inspect.isfunction(inspect.getattr_static(self.python_class, name)):
                raise UserError(f"{self.path}: {name} is static or a class; a tool is a method with `self`")
            try:
                tools[name] = Tool.of(name, method)
            except (PydanticUserError, NameError) as error:
                raise UserError(f"{self.path}: a type of a tool cannot be checked: {first_line(error)}") from None
        return tools

    @functools.cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools, as chat templates take them.

        Raises:
            UserError: a tool has an argument without a type or without a description, or of a type without JSON.
        """
        from transformers.utils import chat_template_utils

        schemas = []
        for name, tool in self.tools.items():
            try:
                schemas.append(tool.schema())
            except PydanticUserError as error:
                raise UserError(
                    f"{self.path}: the tool {name!r} has an argument of a type that is not in JSON: {first_line(error)}"
                ) from None
            except (
                chat_template_utils.TypeHintParsingException,
                chat_template_utils.DocstringParsingException,
            ) as error:
                raise UserError(
                    f"{self.path}: the tool {name!r} needs type hints and a Google-style docstring with an entry for "
                    f"each argument: {first_line(error)}"
                ) from None
        return schemas


class Session:
    """The environment of one conversation: an instance of the class, and what happened in it.

    Args:
        environment_class: of the row's task.
        row: the columns of the row as they were loaded, which `reset` gets.
        tools: JSON schemas of the tools that the model may call; those of `tools_of` are run by `call_tool`.

    Raises:
        CheckError: `reset` raised an exception.
    """

    def __init__(
        self, environment_class: EnvironmentClass, row: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._class = environment_class
        self._tool_names = [tool["function"]["name"] for tool in tools]
        self._row_id = row.get("id")
        self.environment = self._run("Environment", environment_class.python_class)
        self.max_turns = environment_class.constants.MAX_TURNS
        self.calls = 0
        self.failed_calls = 0
        """Calls that were malformed or raised an exception."""

        columns = copy.deepcopy(dict(row))  # `reset` may change them
        opening = self._run("reset", functools.partial(self.environment.reset, **columns))
        if not isinstance(opening, str | None):
            raise CheckError(f"{environment_class.path}: reset returned {opening!r:.60}; expected a text or None")
        self.opening: str = opening or ""
        """The text that `reset` returned."""

    def answer(self, message: Mapping[str, Any], whole_text: str | None = None) -> list[dict[str, str]]:
        """Return the messages that follow the model's: results of its tool calls, or a reply.

        Without a message, the conversation ends.

        Args:
            whole_text: the turn with its thoughts, if the content of the message may be without them.
        """
        calls = message.get("tool_calls")
        if calls and self._class.has("take_calls"):
            return self._take(calls)
        if calls:
            return [self._call(call) for call in calls]
        if not self._class.has("reply"):
            return []

        text = message["content"]
        if not self._class.constants.SEES_THOUGHTS:
            text = thoughts.answer_of(text) or ""
        elif whole_text is not None:
            text = whole_text
        reply = self._run("reply", self.environment.reply, text)
        if not isinstance(reply, str | None):
            raise CheckError(f"{self._class.path}: reply returned {reply!r:.60}; expected a text or None")
        return [] if reply is None else [{"role": "user", "content": reply}]

    def refuse(self, problem: str, tool: str = "unknown") -> dict[str, str]:
        """Return the message that answers a malformed call, and count it."""
        self.failed_calls += 1
        return {"role": "tool", "name": tool, "content": f"error: {problem}"}

    def verdict(self, ended_by: str) -> Verdict:
        """Return the grade of the conversation. Call it once, when the conversation is over.

        Args:
            ended_by: what ended the conversation; see `Episode` in rollouts/episode.py.

        Raises:
            CheckError: `get_reward` raised an exception, or returned a value that is neither a score nor a verdict.
        """
        reward = self._run("get_reward", self.environment.get_reward)
        reason_if_failed = {"limit": "turn_limit", "budget": "token_limit"}.get(ended_by, "wrong_answer")
        verdict = as_verdict(reward, self._class.constants.THRESHOLD, reason_if_failed)
        if verdict is None:
            raise CheckError(f"{self._class.path}: get_reward returned {reward!r:.60}; expected 0 to 1, or a Verdict")
        return verdict

    def _take(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """Pass all calls of a turn to `take_calls`, and return the messages with its results; [] at the end."""
        self.calls += len(calls)
        results = self._run("take_calls", self.environment.take_calls, json.loads(json.dumps(calls)))
        if results is None:
            return []
        are_texts = isinstance(results, list) and all(isinstance(result, str) for result in results)
        if not are_texts or len(results) != len(calls):
            raise CheckError(
                f"{self._class.path}: take_calls returned {results!r:.60} for {len(calls)} calls; expected a list with "
                "a text for each call, or None to end the conversation"
            )
        messages = []
        for call, result in zip(calls, results, strict=True):
            messages.append({"role": "tool", "name": call["function"]["name"], "content": result})
        return messages

    def _call(self, call: Mapping[str, Any]) -> dict[str, str]:
        """Run one tool call, whose form `turns.parse_turn` has checked, and return the message with its result."""
        self.calls += 1
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        run_tool: Callable[..., Any]
        if name in self._class.tools:
            run_tool = functools.partial(self._class.tools[name], self.environment, **arguments)
        elif name in self._tool_names and self._class.has("call_tool"):
            run_tool = functools.partial(self.environment.call_tool, name, json.loads(json.dumps(arguments)))
        else:
            known_names = dict.fromkeys([*self._class.tools, *self._tool_names])
            return self.refuse(f"no tool named {name!r:.60}; {suggestion(name, known_names)}")
        try:
            with self._guarded():
                result = str(asynchronous.finished(run_tool()))
        except WrongArguments as error:
            return self.refuse(first_line(error), name)
        except _FAILURES as error:
            if self._class.constants.RAISE_ERRORS:
                raise self._failed(name, error) from error
            self.failed_calls += 1
            result = f"error: {_class_name(error)}: {first_line(error)}"
        return {"role": "tool", "name": name, "content": result}

    def _run(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the contract within the time limit, and return its result.

        Raises:
            CheckError: it raised an exception, which stops the run.
        """
        try:
            with self._guarded():
                return asynchronous.finished(method(*arguments))
        except _FAILURES as error:
            raise self._failed(name, error) from error

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keep the current directory, and end what takes longer than the file's `SECONDS_PER_CALL`."""
        with python_file.keeping_directory(), _time_limit(self._class.constants.SECONDS_PER_CALL):
            yield

    def _failed(self, name: str, error: BaseException) -> CheckError:
        line = python_file.line_of(error, self._class.path)
        return CheckError(f"{line}: {name} raised {_class_name(error)}: {first_line(error)}; row {self._row_id}")


def _class_name(error: BaseException) -> str:
    return type(error).__name__.lstrip("_")


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeLimit in the block after some seconds. Signals reach only the main thread; others have no limit."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise _TimeLimit(f"the call took more than {seconds:g} s")

    previous_handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
