"""The OpenAI protocol: what is refused, in one line that says what was sent, and what becomes of messages."""

import json

import pytest

from lora_grpo.endpoint.answers import completion, text_choice
from lora_grpo.endpoint.contexts import Context
from lora_grpo.endpoint.protocol import ChatRequest, RequestError, TextRequest, messages_of, parse
from lora_grpo.sampling import SampledTokens

ASK = {"messages": [{"role": "user", "content": "Hi"}]}


def chat(**fields):
    return parse(json.dumps({**ASK, **fields}).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"messages": []}, "messages is []"),
        ({"messages": "Hi"}, "messages is 'Hi'"),
        ({"temperature": 11}, "temperature is 11"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"n": 0}, "n is 0"),
        ({"n": 65}, "n is 65"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"presence_penalty": 0.5}, "presence_penalty is 0.5, which is not supported; leave it out, or send 0"),
        ({"top_k": 40}, "top_k is 40, which is not supported; leave it out, or send -1 or 0"),
        ({"response_format": {"type": "json_object"}}, "response_format is {'type': 'json_object'}"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls is False"),
        ({"audio": {"voice": "alloy"}}, "the field 'audio' is not supported; leave it out"),
        ({"tool_choice": "required"}, "tool_choice is 'required'; expected 'auto' or 'none'"),
        ({"tools": [{"name": "look"}]}, "tools[0] is {'name': 'look'}; expected an object with type 'function'"),
    ],
)
def test_what_cannot_be_honored_is_one_line(fields, problem):
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False},
        {"temperature": 1.0, "top_p": 1.0, "frequency_penalty": 0, "logit_bias": {}, "parallel_tool_calls": True},
        {"stop": ["a", "b"], "n": 2, "seed": 3, "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 0},
        {"tool_choice": "auto", "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]},
        {"stream": True, "stream_options": {"include_usage": True}, "response_format": {"type": "text"}},
    ],
)
def test_what_changes_nothing_or_is_honored_is_accepted(fields):
    chat(**fields)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_one_line(body):
    with pytest.raises(RequestError, match="the body is"):
        parse(body, ChatRequest)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "robot", "content": ""}, "messages[0].role is 'robot'"),
        ({"role": "user", "content": 3}, "messages[0].content is 3"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "a part of type 'image_url'; only text is supported"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "a part of type 'input_audio'"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0] is {'id': '1'}"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]},
            "arguments is '[1'; expected a JSON object",
        ),
    ],
)
def test_a_wrong_message_is_named(message, problem):
    with pytest.raises(RequestError) as caught:
        messages_of(chat(messages=[message]))
    assert problem in str(caught.value)


def test_messages_are_in_the_form_of_chat_templates():
    call = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "call-1", "content": "3"},
    ]
    assert messages_of(chat(messages=messages)) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "3", "name": "add"},
    ]


def test_a_completion_has_one_prompt():
    def prompt(value):
        return parse(json.dumps({"prompt": value}).encode(), TextRequest).single_prompt

    assert prompt("a") == prompt(["a"]) == "a"
    assert prompt([1, 2]) == [1, 2]
    with pytest.raises(RequestError, match="one prompt in a request"):
        prompt(["a", "b"])


def test_no_tools_are_offered_where_the_choice_is_none():
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert chat(tools=tools, tool_choice="none").offered_tools == []
    assert chat(tools=tools).offered_tools == tools


def test_token_ids_are_in_the_answers_that_want_them():
    """As vLLM has them: of the choices, and of the prompt in the answer to a chat, else in each choice."""
    context = Context([1, 5, 6], text_before_answer="", begun_text="", parent=None)
    samples = [SampledTokens([7, 2], "seven", truncated=False), SampledTokens([8], "eight", truncated=True)]
    choices = [text_choice(None, sample, wants_tokens=False) for sample in samples]

    answer = completion("m", chat(return_token_ids=True), context, samples, choices)
    assert answer.chat()["prompt_token_ids"] == [1, 5, 6]
    assert [choice["token_ids"] for choice in answer.chat()["choices"]] == [[7, 2], [8]]
    for choice, token_ids in zip(answer.text()["choices"], [[7, 2], [8]], strict=True):
        assert choice["token_ids"] == token_ids
        assert choice["prompt_token_ids"] == [1, 5, 6]
    events = [json.loads(event.removeprefix("data: ")) for event in [*answer.chat_events(includes_usage=False)][:-1]]
    assert [choice.get("token_ids") for event in events for choice in event["choices"]] == [[7, 2], None, [8], None]

    without = completion("m", chat(), context, samples, choices)
    assert "token_ids" not in json.dumps([without.chat(), without.text(), *without.chat_events(includes_usage=False)])
