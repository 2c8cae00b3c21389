"""Tool calls of the model's turns, in the format of a chat template."""

import types

import pytest
from trl import chat_template_utils

from lora_grpo.prompts import turns

BEFORE = "<|im_start|>assistant\n"
FORMAT = chat_template_utils.add_response_schema(
    types.SimpleNamespace(chat_template=chat_template_utils.qwen2_5_chat_template)
).response_template


def call(text):
    return f"<tool_call>\n{text}\n</tool_call>"


def parse(text):
    return turns.parse_turn(f"{text}<|im_end|>", FORMAT, BEFORE)


def test_calls_and_text_are_read():
    function = {"name": "look_up", "arguments": {"key": "é"}}
    written = call('{"name": "look_up", "arguments": {"key": "é"}}')
    expected = {"type": "function", "function": function}
    assert parse(f"I look.\n{written}\n{written}") == {
        "role": "assistant", "content": "I look.", "tool_calls": [expected, expected],
    }  # fmt: skip
    assert parse("42") == {"role": "assistant", "content": "42"}


@pytest.mark.parametrize(
    "text",
    [
        *("look_up", '"look_up"', "[]", "3", "{}", '{"name": "look_up"}', '{"name": "look_up", "arguments": "key"}'),
        *('{"name": "look_up", "arguments": {"key": 1}', "[" * 100_000, "1" * 5000),
        '{"name": "look_up", "arguments": {"key": "\\ud800"}}',  # half a character
        *(f'{{"name": "look_up", "arguments": {{"key": {number}}}}}' for number in ("NaN", "[-Infinity]", "1e999")),
    ],
)
def test_a_malformed_call_is_refused(text):
    with pytest.raises(turns.MalformedCall) as refusal:
        parse(call(text))
    assert str(refusal.value) and "\n" not in str(refusal.value)
