"""Messages of prompts, and their text in the format of a chat template or in plain text."""

import pytest
from helpers.gguf_models import CHATML, chatml, published_template, qwen_tokenizer

from lora_grpo.errors import UserError
from lora_grpo.prompts.chat import add_prompts, answer_lead, end_of_turn, render, render_row
from lora_grpo.prompts.styles import SYSTEM_PROMPTS

ROW = {"id": "a/0", "question": "1 + 1?", "answer": "2"}
SOLVED = {"id": "a/1", "question": "2 + 2?", "answer": "4"}


class PlainTokenizer:
    """Stands for the tokenizer of a base model."""

    chat_template = None


def test_a_prompt_is_the_styles_system_message_and_the_question():
    (row,) = add_prompts([ROW], "xml")
    assert row == {
        **ROW,
        "prompt": [{"role": "system", "content": SYSTEM_PROMPTS["xml"]}, {"role": "user", "content": "1 + 1?"}],
        "prompt_style": "xml",
    }
    assert "prompt" not in ROW


def test_examples_become_turns():
    (row,) = add_prompts([ROW], "think", [(SOLVED["question"], "think 4")])
    assert row["prompt"][1:] == [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "think 4"},
        {"role": "user", "content": "1 + 1?"},
    ]


def test_a_row_is_not_shown_its_own_solution():
    (row,) = add_prompts([SOLVED], "xml", [(SOLVED["question"], "4")])
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("template", "ending"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3_instruct_2507", "<|im_start|>assistant\n"),
        ("qwen2_5", "<|im_start|>assistant\n"),
        ("llama3_2", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ],
)
def test_thinking_is_off_in_the_templates_of_the_listed_models(template, ending):
    (row,) = add_prompts([ROW], "xml")
    rendered = render_row(qwen_tokenizer(published_template(template)), row)
    assert rendered.endswith(ending)
    assert rendered.count("1 + 1?") == 1


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("qwen2_5", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("gemma", ""),  # its end of a turn is no special token of this tokenizer
        ("llama3_2", ""),
        (None, ""),
    ],
)
def test_a_template_ends_an_answer_with_a_special_token(template, end):
    assert end_of_turn(qwen_tokenizer(template and published_template(template))) == end


REFUSALS = {
    # A condition on which a template raises an error, the roles of the messages, and whether the fix adds or drops a
    # system message.
    "demands a system message": ("messages[0].role != 'system'", ["user"], "adds"),
    "has no system role": ("messages[0].role == 'system'", ["system", "user"], "drops"),
    "rejects all messages": ("true", ["user"], "neither"),
    "rejects two messages of the user": ("messages[-2].role == 'user'", ["system", "user", "user"], "neither"),
}


@pytest.mark.parametrize(("condition", "roles", "fix"), REFUSALS.values(), ids=REFUSALS)
def test_the_fix_for_messages_that_a_template_rejects_is_one_that_helps(condition, roles, fix):
    template = "{% if " + condition + " %}{{ raise_exception('no') }}{% endif %}" + CHATML
    with pytest.raises(UserError) as refused:
        render(qwen_tokenizer(template), [{"role": role, "content": "a"} for role in roles])
    message = str(refused.value)
    assert ("demands a system message" in message) == (fix == "adds")
    assert ("with a system role" in message) == (fix == "drops")


def test_a_template_that_demands_a_system_message_ends_an_answer_and_a_thought():
    demand = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
    thought = "('<think>\\n</think>' if message.role == 'assistant' else '')"
    opened_thought = "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    thinking = chatml(content=f"{thought} + message['content']") + opened_thought
    tokenizer = qwen_tokenizer(demand + thinking)
    assert end_of_turn(tokenizer) == "<|im_end|>"
    assert answer_lead(tokenizer) == answer_lead(qwen_tokenizer(thinking)) != ""


def test_render_without_a_chat_template_is_plain_text():
    prompt = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q1"},
        {"role": "assistant", "content": "{A1}"},
        {"role": "user", "content": "Q2"},
    ]
    assert render(PlainTokenizer(), prompt) == "S\n\nQuestion: Q1\nAnswer: {A1}\n\nQuestion: Q2\nAnswer:"
    assert render(object(), prompt[-1:]) == "Question: Q2\nAnswer:"


ROW_OF_CODE = {"prompt": [{"role": "user", "content": "Write f."}], "completion_prefix": "def f(x):\n"}


def test_a_base_model_goes_on_with_the_program_that_a_row_begins():
    assert render_row(PlainTokenizer(), ROW_OF_CODE) == "def f(x):\n"
    assert render_row(PlainTokenizer(), {**ROW_OF_CODE, "completion_prefix": ""}) == "Question: Write f.\nAnswer:"
