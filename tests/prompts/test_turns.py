"""Tool calls of the model's turns, in the format of a chat template."""

import json
import types

import pytest
from trl import chat_template_utils

from lora_grpo.prompts import turns

BEFORE = "<|im_start|>assistant\n"


def format_of(chat_template):
    return chat_template_utils.add_response_schema(types.SimpleNamespace(chat_template=chat_template)).response_template


FORMAT = format_of(chat_template_utils.qwen2_5_chat_template)


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


PROPERTIES = {"number": {"type": "integer"}, "word": {"type": "string"}, "exact": {"type": "boolean"}}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"properties": PROPERTIES}}}]


def test_a_format_without_types_takes_those_of_the_tool():
    """Qwen3.5 writes the number 12 and the text 12 alike."""
    parameters = ""
    for name, value in {"number": 12, "word": 12, "exact": True}.items():
        parameters += f"<parameter={name}>\n{value}\n</parameter>\n"
    text = f"<tool_call>\n<function=look_up>\n{parameters}</function>\n</tool_call><|im_end|>"
    qwen3_5 = format_of(chat_template_utils.qwen3_5_nothink_chat_template)
    [read] = turns.parse_turn(text, qwen3_5, BEFORE, TOOLS)["tool_calls"]
    assert read["function"] == {"name": "look_up", "arguments": {"number": 12, "word": "12", "exact": True}}


def test_a_text_in_json_stays_a_text():
    arguments = {"number": "12", "exact": "True"}
    text = call(json.dumps({"name": "look_up", "arguments": arguments}))
    [read] = turns.parse_turn(f"{text}<|im_end|>", FORMAT, BEFORE, TOOLS)["tool_calls"]
    assert read["function"]["arguments"] == arguments
