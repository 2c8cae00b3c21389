"""The model's turn as a message: thoughts apart from the content, and calls apart from both."""

import pytest
from trl import chat_template_utils

from lora_grpo import starter
from lora_grpo.config import ModelConfig
from lora_grpo.endpoint.contexts import Context, KnownConversations, answer_message
from lora_grpo.endpoint.protocol import RequestError
from lora_grpo.models import base_model

NO_CONTEXT = Context([], "", "", parent=None)
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = base_model.load_tokenizer(ModelConfig(name=str(starter.model_path())))
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template
    return tokenizer


@pytest.mark.parametrize(
    ("text", "content", "thought"),
    [
        ("Seven.", "Seven.", None),
        ("<think>\n3 and 4\n</think>\n\nSeven.", "Seven.", "3 and 4"),
        ("[THINK]3 and 4[/THINK]Seven.", "Seven.", "3 and 4"),
        ("3 and 4</think>Seven.", "Seven.", "3 and 4"),
        ("<think>3 and", "", "3 and"),
        ("Write `</think>` here.", "Write `</think>` here.", None),
    ],
)
def test_thoughts_are_no_content(tokenizer, text, content, thought):
    message = answer_message(tokenizer, NO_CONTEXT, [], text, tools=[])
    assert message["content"] == content
    assert message.get("reasoning_content") == thought


def test_tool_calls_are_parsed_and_malformed_ones_stay_in_the_content(tokenizer):
    def message_of(text):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return answer_message(tokenizer, Context([], "<|im_start|>assistant\n", "", None), ids, text, tools=TOOLS)

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    message = message_of(f"Let me see.\n{call}")
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert "tool_call" not in message["content"]
    for text in ('<tool_call>\n{"name": "add"\n</tool_call>', "<think>" + call, "No call."):
        assert "tool_calls" not in message_of(text)


def test_the_arguments_of_a_call_have_the_types_of_the_tool(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", chat_template_utils.qwen3_5_nothink_chat_template)
    text = "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    context = Context([], "<|im_start|>assistant\n", "", None)
    [call] = answer_message(tokenizer, context, ids, text, tools=TOOLS)["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 12}}


def test_what_a_client_changes_in_a_message_without_meaning_continues_the_same_ids(tokenizer):
    """A client may drop thoughts, ids of calls and empty fields; another content begins anew."""
    from lora_grpo.endpoint import Call

    def encode(prompts):
        return tokenizer(prompts, add_special_tokens=False)["input_ids"]

    conversations = KnownConversations(tokenizer, [2], encode)
    question = {"role": "user", "content": "3 and 4?"}
    context = conversations.context([question], [])
    answer = {"role": "assistant", "content": "Seven.", "reasoning_content": "3, 4"}
    call = Call(context.token_ids, [7, 8, 2], None, "Seven.", False, False, [question, answer], None, (0, [], 0))
    conversations.add(call, [])

    def parent_of(*messages, tools=()):
        return conversations.context(messages, tools).parent

    following = {"role": "user", "content": "Sure?"}
    assert parent_of(question, {"role": "assistant", "content": "Seven."}, following) is call
    continued = conversations.context([question, answer, following], [])
    assert continued.token_ids[: len(call.all_ids)] == call.all_ids
    assert continued.token_ids.count(2) == call.all_ids.count(2) + 1  # the end of the turn is not written twice
    assert parent_of(question, {"role": "assistant", "content": "seven."}, following) is None
    assert parent_of({"role": "system", "content": "Be brief."}, question, answer, following) is None
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert parent_of(question, answer, following, tools=[tool]) is None


def test_a_text_after_a_stop_is_read_as_the_client_sends_it(tokenizer):
    from lora_grpo.endpoint import Call

    def encode(prompts):
        return tokenizer(prompts, add_special_tokens=False)["input_ids"]

    conversations = KnownConversations(tokenizer, [2], encode)
    prompt = "Question: 3 and 4?\nThought:"
    context = conversations.text_context(prompt)
    [sampled_ids] = encode([" I add.\nObservation:"])
    # The sampler has ended at the stop "\nObservation:", and the answer is the text before it.
    call = Call(context.token_ids, sampled_ids, None, " I add.", False, False, [], None, (0, [], 0))
    conversations.add_text(prompt, call)

    after_stop = conversations.text_context(f"{prompt} I add.\nObservation: 7")
    assert after_stop.parent is call
    assert after_stop.token_ids == [*call.all_ids, *encode([" 7"])[0]]
    without_stop = conversations.text_context(f"{prompt} I add.\nAnswer:")
    assert without_stop.parent is None
    assert "Observation" not in tokenizer.decode(without_stop.token_ids)


def test_a_model_without_a_chat_template_refuses_the_result_of_a_tool():
    tokenizer = base_model.load_tokenizer(ModelConfig(name=str(starter.model_path())))
    tokenizer.chat_template = None
    conversations = KnownConversations(tokenizer, [2], lambda prompts: tokenizer(prompts)["input_ids"])
    assert conversations.context([{"role": "user", "content": "Hi"}], []).token_ids
    with pytest.raises(RequestError, match="no chat template"):
        conversations.context([{"role": "user", "content": "Hi"}, {"role": "tool", "content": "3"}], [])


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([3, 999_999_999], "the token id 999999999; expected 0 to"),
        ([-5], "the token id -5"),
        ("", "prompt is empty"),
    ],
)
def test_a_text_that_a_model_cannot_read_is_refused(tokenizer, prompt, problem):
    def encode(prompts):
        return tokenizer(prompts, add_special_tokens=False)["input_ids"]

    with pytest.raises(RequestError, match=problem):
        KnownConversations(tokenizer, [2], encode).text_context(prompt)
