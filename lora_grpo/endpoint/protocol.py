"""The OpenAI protocol: requests that are checked, and the answers to them.

Only what the sampler can honor is accepted. Anything else that would change the answer is a `RequestError`, so that no
client believes that it samples greedily while it samples at the temperature of the run.

Source: the reference of OpenAI's chat completions and completions.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

MAX_CHOICES = 64
"""Maximum of `n`."""

_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("verbosity", "reasoning_effort"),
)
"""Fields that do not change what is sampled here: labels, billing, and wishes that need another kind of model."""

_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (-1, 0),
    "min_p": (0,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields that are honored only with the values that change nothing."""

_TEXT_PARTS = ("text", "input_text", "output_text")


class RequestError(Exception):
    """A request that cannot be answered. The message is one line: what, got, expected, and the fix."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class StreamOptions(BaseModel):
    include_usage: bool = False


class SamplingFields(BaseModel):
    """The fields that chat completions and completions share."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    temperature: Annotated[float | None, Field(ge=0, le=10)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    max_tokens: PositiveInt | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """vLLM's extension: whether the answer has the token ids of the prompt and of the completions."""

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end a completion."""
        if not self.stop:
            return ()
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(text for text in texts if text)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(SamplingFields):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else list(self.tools or ())


class TextRequest(SamplingFields):
    """The body of `POST /v1/completions`."""

    prompt: str | list[int] | list[str]
    logprobs: int | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def single_prompt(self) -> str | list[int]:
        """The prompt: a text or token ids."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1 and isinstance(self.prompt[0], str):
            return self.prompt[0]
        token_ids = [item for item in self.prompt if isinstance(item, int)]
        if not token_ids or len(token_ids) != len(self.prompt):
            raise RequestError(f"prompt is a list of {len(self.prompt)} texts; send one prompt in a request")
        return token_ids


Parsed = TypeVar("Parsed", ChatRequest, TextRequest)


def parse(body: bytes, kind: type[Parsed]) -> Parsed:
    """Return a checked request, or raise RequestError."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(f"the body is {_shown(fields)}; expected an object")
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        raise RequestError(f"{name} is {_shown(problem['input'])}: {problem['msg']}") from None

    for name, value in (request.model_extra or {}).items():
        if value is None or name in _WITHOUT_EFFECT or value in _NEUTRAL_VALUES.get(name, ()):
            continue
        if name in _NEUTRAL_VALUES:
            neutral = " or ".join(map(repr, _NEUTRAL_VALUES[name]))
            raise RequestError(f"{name} is {_shown(value)}, which is not supported; leave it out, or send {neutral}")
        raise RequestError(f"the field {name!r:.60} is not supported; leave it out")
    if isinstance(request, ChatRequest):
        _check_tools(request)
    return request


def _check_tools(request: ChatRequest) -> None:
    if request.tool_choice not in (None, "auto", "none"):
        raise RequestError(
            f"tool_choice is {_shown(request.tool_choice)}; expected 'auto' or 'none', because a call cannot be forced"
        )
    for number, tool in enumerate(request.tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
            raise RequestError(
                f"tools[{number}] is {_shown(tool)}; expected an object with type 'function' and a named 'function'"
            )


def messages_of(request: ChatRequest) -> list[dict[str, Any]]:
    """Return the messages of a request in the form that chat templates take.

    Contents are texts, the arguments of tool calls are objects, and the results of tools have the name of their tool.
    """
    messages = []
    tool_names: dict[str, str] = {}  # by the id of the call
    for number, message in enumerate(request.messages):
        where = f"messages[{number}]"
        role = message.get("role")
        if role == "developer":
            role = "system"
        if role not in ("system", "user", "assistant", "tool"):
            raise RequestError(f"{where}.role is {_shown(role)}; expected system, developer, user, assistant or tool")
        checked: dict[str, Any] = {"role": role, "content": _text_of(message.get("content"), where)}

        calls = message.get("tool_calls")
        if calls and role == "assistant":
            checked["tool_calls"] = [_call_of(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
            for call, checked_call in zip(calls, checked["tool_calls"], strict=True):
                tool_names[str(call.get("id"))] = checked_call["function"]["name"]
        if role == "tool":
            call_id = str(message.get("tool_call_id"))
            checked["name"] = message.get("name") or tool_names.get(call_id) or "unknown"
        thought = message.get("reasoning_content")
        if thought and role == "assistant":
            checked["reasoning_content"] = str(thought)
        messages.append(checked)
    return messages


def _text_of(content: Any, where: str) -> str:
    """Return the text of a content: a text, None, or parts that are texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content is {_shown(content)}; expected a text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content has a part of type {_shown(kind)}; only text is supported")
        texts.append(part["text"])
    return "".join(texts)


def _call_of(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call of the assistant, with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} is {_shown(call)}; expected an object with 'function' and its 'name'")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments is {_shown(function.get('arguments'))}; expected a JSON object")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _shown(value: Any) -> str:
    return f"{value!r:.80}"


# Answers


@dataclass(frozen=True)
class Token:
    """One sampled token of a completion."""

    text: str
    logprob: float | None
    """In nats; None if the sampler returns none."""


@dataclass(frozen=True)
class Choice:
    """One completion of a request."""

    content: str
    finish_reason: Literal["stop", "length", "tool_calls"]
    reasoning_content: str = ""
    """The model's thoughts, without their markers."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """Each with `id`, `type` and `function`, whose arguments are a JSON text."""
    tokens: tuple[Token, ...] | None = None
    """For requests with `logprobs`."""
    token_ids: Sequence[int] | None = None
    """For requests with `return_token_ids`."""

    def message(self) -> dict[str, Any]:
        """Return the model's turn as a message of a chat completion."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = list(self.tool_calls)
        return message


@dataclass(frozen=True)
class Completion:
    """The answer to a request."""

    id: str
    model: str
    choices: Sequence[Choice]
    prompt_tokens: int
    completion_tokens: int
    prompt_token_ids: Sequence[int] | None = None
    """For requests with `return_token_ids`."""

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }

    def chat(self) -> dict[str, Any]:
        """Return the body of a chat completion."""
        choices = []
        for index, choice in enumerate(self.choices):
            entry = {"index": index, "message": choice.message(), "finish_reason": choice.finish_reason}
            choices.append({**entry, "logprobs": _chat_logprobs(choice.tokens), **_ids("token_ids", choice.token_ids)})
        prompt_ids = _ids("prompt_token_ids", self.prompt_token_ids)
        return {**self._head("chat.completion"), "choices": choices, "usage": self.usage, **prompt_ids}

    def text(self) -> dict[str, Any]:
        """Return the body of a completion."""
        choices = []
        for index, choice in enumerate(self.choices):
            entry = {"index": index, "text": choice.content, "finish_reason": choice.finish_reason}
            token_ids = _ids("token_ids", choice.token_ids)
            prompt_ids = _ids("prompt_token_ids", self.prompt_token_ids)
            choices.append({**entry, "logprobs": _text_logprobs(choice.tokens), **token_ids, **prompt_ids})
        return {**self._head("text_completion"), "choices": choices, "usage": self.usage}

    def chat_events(self, *, includes_usage: bool) -> Iterator[str]:
        """Yield the events of a streamed chat completion: the message of each choice, and how it ended."""
        head = self._head("chat.completion.chunk")
        for index, choice in enumerate(self.choices):
            delta = choice.message()
            if choice.tool_calls:
                delta["tool_calls"] = [{**call, "index": number} for number, call in enumerate(choice.tool_calls)]
            entry = {"index": index, "delta": delta, "finish_reason": None, **_ids("token_ids", choice.token_ids)}
            prompt_ids = _ids("prompt_token_ids", self.prompt_token_ids)
            yield _event({**head, "choices": [{**entry, "logprobs": _chat_logprobs(choice.tokens)}], **prompt_ids})
            end = {"index": index, "delta": {}, "finish_reason": choice.finish_reason, "logprobs": None}
            yield _event({**head, "choices": [end]})
        yield from self._end_of_stream(head, includes_usage=includes_usage)

    def text_events(self, *, includes_usage: bool) -> Iterator[str]:
        """Yield the events of a streamed completion."""
        head = self._head("text_completion")
        for choice in self.text()["choices"]:
            yield _event({**head, "choices": [choice]})
        yield from self._end_of_stream(head, includes_usage=includes_usage)

    def _end_of_stream(self, head: Mapping[str, Any], *, includes_usage: bool) -> Iterator[str]:
        if includes_usage:
            yield _event({**head, "choices": [], "usage": self.usage})
        yield "data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}


def _event(body: Mapping[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def _ids(name: str, token_ids: Sequence[int] | None) -> dict[str, list[int]]:
    """Return a field with token ids, or no field for requests that do not want them."""
    return {} if token_ids is None else {name: list(token_ids)}


def _chat_logprobs(tokens: Sequence[Token] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    content = []
    for token in tokens:
        encoded = list(token.text.encode(errors="replace"))
        content.append({"token": token.text, "logprob": token.logprob, "bytes": encoded, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _text_logprobs(tokens: Sequence[Token] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    offsets = []
    position = 0
    for token in tokens:
        offsets.append(position)
        position += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "text_offset": offsets,
        "top_logprobs": None,
    }
