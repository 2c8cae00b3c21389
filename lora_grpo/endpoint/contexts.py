"""From messages to token ids: what the model reads for a request, so that sampled tokens are never encoded again.

A client sends the whole conversation with every request, as text. To encode that text would give other tokens than
those that the model sampled: a tokenizer joins them in other ways, and templates drop earlier thoughts. So the calls of
an episode are kept, and a request that begins like one of them continues its ids. Only what follows is encoded.

    request 1   [system, user]                        -> rendered and encoded
    request 2   [system, user, answer 1, tool]        -> ids of request 1, ids of answer 1, and what follows them
    request 3   [system, summary of the above]        -> rendered and encoded: history was rewritten
    request 4   [system, user, answer 1, other tool]  -> as request 2, beside it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.endpoint.protocol import RequestError
from lora_grpo.errors import UserError
from lora_grpo.prompts import chat, thoughts, turns


@dataclass(frozen=True)
class Context:
    """What the model reads before it answers a request."""

    token_ids: list[int]
    text_before_answer: str
    """The end of the rendered text, at least from the header of the model's turn."""
    begun_text: str
    """What this text has begun of the model's turn, such as `<think>`; see `thoughts.begun`."""
    parent: Call | None
    """The call whose ids it continues; None if it was rendered as a whole."""


@dataclass(frozen=True, eq=False)
class Call:
    """One completion of the model in an episode: what it read, and what it sampled."""

    context_ids: list[int]
    """The T ids that the model read."""
    token_ids: list[int]
    """The sampled ids."""
    logprobs: list[float] | None
    """Of the sampled ids, in nats."""
    text: str
    """The decoded completion with what its context has begun, without special tokens."""
    truncated: bool
    """Whether it was cut at its limit."""
    asked_next_question: bool
    """Whether it ended at the next `Question:` of a plain prompt."""
    messages: list[dict[str, Any]]
    """The messages of the request, and the model's turn."""
    parent: Call | None
    """The call that it continues; None if its context was rendered as a whole."""
    place: tuple[int, list[int], int]
    """Its place among the calls of its episode, which does not depend on the order in which parallel calls arrive: its
    depth in its conversation, its context, and its number among the calls with this context."""

    @property
    def all_ids(self) -> list[int]:
        return self.context_ids + self.token_ids


class KnownConversations:
    """The conversations of an episode, by their messages.

    Args:
        tokenizer: of the model.
        eos_token_ids: the tokens that can end a turn.
        encode: returns the ids of rendered prompts; see `Sampler.encode`.
    """

    def __init__(
        self, tokenizer: Any, eos_token_ids: Sequence[int], encode: Callable[[list[str]], list[list[int]]]
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = set(eos_token_ids)
        self._encode = encode
        self._calls: dict[str, Call] = {}
        """The last call of each conversation, by its messages, the model's turn included."""
        self._text_calls: list[tuple[str, Call]] = []
        """Completions of plain prompts, with the text of the prompt and of all sampled tokens."""

    def context(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> Context:
        """Return what the model reads for a chat completion.

        Args:
            messages: in the form of `protocol.messages_of`.

        Raises:
            RequestError: the chat template rejects the messages, or has no tool calls.
        """
        try:
            if tools:
                turns.response_format(self._tokenizer)  # raises UserError if the template has no tools
            known = self._known_part(messages, tools)
            if known is not None:
                call, following = known
                return self._continued(call, following)
            prompt = chat.render_prompt(self._tokenizer, messages, tools)
        except UserError as error:
            raise RequestError(str(error)) from error
        begun = thoughts.begun(prompt, chat.prefill(messages))
        [token_ids] = self._encode([prompt])
        return Context(list(token_ids), prompt, begun, parent=None)

    def text_context(self, prompt: str | list[int]) -> Context:
        """Return what the model reads for a completion of a text, or of token ids.

        Raises:
            RequestError: the prompt has no tokens, or ids that are none.
        """
        if not isinstance(prompt, str):
            for token_id in prompt:
                if not 0 <= token_id < len(self._tokenizer):
                    raise RequestError(f"prompt has the token id {token_id}; expected 0 to {len(self._tokenizer) - 1}")
            return Context(list(prompt), "", "", parent=None)

        # The longest text of an earlier completion that the prompt begins with.
        longest_text = ""
        parent = None
        for text, call in self._text_calls:
            if len(text) > len(longest_text) and prompt.startswith(text):
                longest_text = text
                parent = call
        if parent is None:
            [token_ids] = self._encode([prompt])
            if not token_ids:
                raise RequestError("prompt is empty; send at least one token")
            return Context(list(token_ids), prompt, thoughts.begun(prompt), parent=None)

        # A token that ended the earlier completion is no part of its text.
        known_ids = parent.all_ids
        if parent.token_ids and parent.token_ids[-1] in self._eos_token_ids:
            known_ids = known_ids[:-1]
        following_ids = self._encode_part(prompt.removeprefix(longest_text))
        return Context(known_ids + following_ids, prompt, thoughts.begun(prompt), parent)

    def add(self, call: Call, tools: Sequence[dict[str, Any]]) -> None:
        """Remember a call of chat completions, so that later requests can continue it."""
        self._calls[_key(call.messages, tools)] = call

    def add_text(self, prompt: str, call: Call) -> None:
        """Remember a call of completions by all that the model has read and written.

        That includes a stop text, which the answer is without. A client that goes on from the answer alone does not
        continue the sampled ids.
        """
        [text] = thoughts.decode(self._tokenizer, [call.token_ids])
        self._text_calls.append((prompt + text, call))

    def _known_part(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> tuple[Call, Sequence[dict[str, Any]]] | None:
        """Return the call that a request continues and the messages after it, or None if it continues none."""
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1]["role"] != "assistant":
                continue
            following = messages[length:]
            if any(message["role"] == "assistant" for message in following):
                return None  # a turn that this model did not take
            call = self._calls.get(_key(messages[:length], tools))
            if call is not None:
                return call, following
        return None

    def _continued(self, call: Call, following: Sequence[dict[str, Any]]) -> Context:
        """Return the ids of a call and those of the messages after it."""
        text = turns.following_text(self._tokenizer, following)
        text = text.encode(errors="replace").decode()  # half a character becomes "?"
        if call.asked_next_question:
            text = text.partition("Question:")[2]  # the model has written it
        following_ids = turns.without_end_of_turn(self._encode_part(text), call.token_ids[-1], self._eos_token_ids)
        return Context(call.all_ids + following_ids, text, thoughts.begun(text), call)

    def _encode_part(self, text: str) -> list[int]:
        """Return the ids of a text in the middle of a sequence."""
        if not text:
            return []
        ids: list[int] = self._tokenizer([text], add_special_tokens=False)["input_ids"][0]
        return list(ids)


def answer_message(
    tokenizer: Any, context: Context, sampled_ids: Sequence[int], text: str, *, tools: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the model's turn as a message: `content`, and `reasoning_content` and `tool_calls` if it has any.

    A tool call that cannot be parsed stays in the content.

    Args:
        sampled_ids: the ids of the turn.
        text: the same without special tokens, after what the context has begun.
        tools: the JSON schemas of those that were offered.
    """
    answer_start = thoughts.answer_start(text)
    answer = thoughts.answer_of(text)
    message: dict[str, Any] = {"role": "assistant", "content": answer or ""}
    thought = text if answer_start is None else text[:answer_start]
    if thought:
        message["reasoning_content"] = thoughts.without_markers(thought)
    if not tools or answer is None:  # a thought that is not closed calls no tool
        return message

    tool_call_format = turns.response_format(tokenizer)
    try:
        parsed = turns.parse_turn(tokenizer.decode(sampled_ids), tool_call_format, context.text_before_answer, tools)
    except turns.MalformedCall:
        return message
    if parsed.get("tool_calls"):
        message["content"] = parsed["content"]
        message["tool_calls"] = parsed["tool_calls"]
    return message


def _key(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a text that is equal for equal conversations: thoughts and the ids of tool calls do not count."""
    entries = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            calls.append([function["name"], function["arguments"]])
        entries.append([message["role"], message["content"] or "", message.get("name") or "", calls])
    return json.dumps([entries, list(tools)], sort_keys=True)
