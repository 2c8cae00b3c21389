import pytest
from helpers.gguf_models import CHATML, published_template, qwen_tokenizer

from lora_grpo.errors import UserError
from lora_grpo.prompts.chat import add_prompts, answer_lead, end_of_turn, render, render_row
from lora_grpo.prompts.styles import SYSTEM_PROMPTS, read_completion, write_completion
from lora_grpo.prompts.template_variables import (
    THINKING_TOKENS,
    parse_kwargs,
    set_variables,
    variables,
    with_fixed_variables,
)

ROW = {"id": "a/0", "question": "1 + 1?", "answer": "2"}
SOLVED = {"id": "a/1", "question": "2 + 2?", "answer": "4"}


class Tokenizer:
    def __init__(self, chat_template):
        self.chat_template = chat_template

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **variables):
        assert not tokenize
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>" * add_generation_prompt


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
    assert rendered.endswith(ending) and rendered.count("1 + 1?") == 1


QWEN3 = published_template("qwen3")
THINKS, DOES_NOT = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
ASKED = [{"role": "user", "content": "1 + 1?"}]


@pytest.mark.parametrize(
    ("given", "tokens", "ending", "why"),
    [
        ({}, THINKING_TOKENS - 1, DOES_NOT, "off, because completions have at most 2047 tokens, and 2048 leave room"),
        ({}, THINKING_TOKENS, THINKS, "on, because completions have at most 2048 tokens"),
        ({"enable_thinking": True}, 8, THINKS, "on, because --model.chat-template-kwargs sets enable_thinking"),
        ({"enable_thinking": False}, 9999, DOES_NOT, "off, because --model.chat-template-kwargs sets enable_thinking"),
    ],
)
def test_the_length_of_a_completion_decides_whether_a_hybrid_model_thinks(given, tokens, ending, why, capsys):
    tokenizer = qwen_tokenizer(QWEN3)
    assert set_variables(tokenizer, given, tokens) == {"enable_thinking": ending == THINKS}
    assert render(tokenizer, ASKED).endswith(ending)
    # Programs that know nothing of the kit render the same, unless they pass another value.
    own = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(ASKED, **own) == render(tokenizer, ASKED)
    assert tokenizer.apply_chat_template(ASKED, **own, enable_thinking=ending != THINKS) != render(tokenizer, ASKED)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"thinking: {why}")


def test_what_a_template_says_stays_unless_another_value_is_given(capsys):
    tokenizer = qwen_tokenizer(QWEN3)
    set_variables(tokenizer, {"enable_thinking": True}, 8)
    once = tokenizer.chat_template
    assert set_variables(tokenizer, {}, 8) == {"enable_thinking": True} and tokenizer.chat_template == once
    assert "on, because its chat template sets enable_thinking" in capsys.readouterr().err
    set_variables(tokenizer, {"enable_thinking": False}, 8)
    assert tokenizer.chat_template == once.replace("true", "false", 1)


def test_a_fixed_template_ignores_what_a_server_passes():
    tokenizer = qwen_tokenizer(QWEN3)
    set_variables(tokenizer, {}, 8)
    expected = render(tokenizer, ASKED)
    tokenizer.chat_template = with_fixed_variables(tokenizer.chat_template)
    own = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(ASKED, **own, enable_thinking=True) == expected
    assert with_fixed_variables(QWEN3) == QWEN3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("null", None), ("3", 3), ("0.5", 0.5), ("high", "high"), ('"3"', "3"), ("", ""),
        ("NaN", "NaN"),
        ("26 Jul 2024", "26 Jul 2024"), ("a=b", "a=b"), ('{% x %}\n"é\\', '{% x %}\n"é\\'),
    ],
)  # fmt: skip
def test_values_reach_the_template_as_they_are_written(text, value):
    tokenizer = qwen_tokenizer("\n{{ level }} of {{ level.__class__.__name__ or level is string }}")
    tokenizer.chat_template = "\n{{ level | tojson }}"
    given = parse_kwargs([f"level={text}"])
    assert given == {"level": value} and type(given["level"]) is type(value)
    expected = tokenizer.apply_chat_template(ASKED, tokenize=False, level=value)
    set_variables(tokenizer, given, 8)
    assert render(tokenizer, ASKED) == expected
    assert variables(tokenizer.chat_template)["level"] == value


def test_a_prompt_does_not_depend_on_the_date():
    template = published_template("llama3_2")
    assert "strftime_now" in template
    (row,) = add_prompts([ROW], "xml")
    tokenizer = qwen_tokenizer(template)
    assert "\nToday Date: 26 Jul 2024\n" in render_row(tokenizer, row)
    set_variables(tokenizer, {"date_string": "1 May 2025"}, 8)
    assert "\nToday Date: 1 May 2025\n" in render_row(tokenizer, row)


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
    opened = "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    thought = "('<think>\\n</think>' if message.role == 'assistant' else '')"
    closed = CHATML.replace("message['content']", f"{thought} + message['content']")
    tokenizer = qwen_tokenizer(demand + closed + opened)
    assert end_of_turn(tokenizer) == "<|im_end|>"
    assert answer_lead(tokenizer) == answer_lead(qwen_tokenizer(closed + opened)) != ""


def test_render_without_a_chat_template_is_plain_text():
    prompt = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q1"},
        {"role": "assistant", "content": "{A1}"},
        {"role": "user", "content": "Q2"},
    ]
    assert render(Tokenizer(None), prompt) == "S\n\nQuestion: Q1\nAnswer: {A1}\n\nQuestion: Q2\nAnswer:"
    assert render(object(), prompt[-1:]) == "Question: Q2\nAnswer:"


@pytest.mark.parametrize("style", ["xml", "hashes", "think"])
@pytest.mark.parametrize("reasoning", ["one line", "two\nlines", "4 < 5"])
def test_what_is_written_is_read_back(style, reasoning):
    assert read_completion(write_completion(reasoning, "18", style), style) == (reasoning, "18")


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("xml", ""),
        ("xml", "<reasoning>r</reasoning>"),
        ("xml", "<reasoning>r</reasoning><answer>18"),
        ("xml", "Well. <reasoning>r</reasoning><answer>18</answer>"),
        ("xml", "<reasoning>r</reasoning> so <answer>18</answer>"),
        ("xml", "<reasoning>r</reasoning><answer>18</answer> Done."),
        ("xml", "<answer>18</answer><reasoning>r</reasoning>"),
        ("xml", "<reasoning>r<answer>18</answer></reasoning>"),
        ("xml", "<reasoning>r</reasoning></answer>18<answer>"),
        ("xml", "<reasoning>r</reasoning><answer>17</answer><answer>18</answer>"),
        ("xml", "<reasoning>r</reasoning><answer><answer>18</answer>"),
        ("xml", "<reasoning><reasoning>r</reasoning><answer>18</answer>"),
        ("xml", "<think>r</think><answer>18</answer>"),
        ("think", "<reasoning>r</reasoning><answer>18</answer>"),
        ("hashes", "r\n####18"),
        ("hashes", "r #### 18"),
        ("hashes", "r\n#### 18\nDone."),
        ("hashes", "#### 17\n#### 18"),
        ("hashes", "r\n##### 18"),
    ],
)
def test_a_completion_that_leaves_the_style_is_not_read(style, text):
    assert read_completion(text, style) is None


ROW_OF_CODE = {"prompt": [{"role": "user", "content": "Write f."}], "completion_prefix": "def f(x):\n"}


def test_a_base_model_goes_on_with_the_program_that_a_row_begins():
    assert render_row(Tokenizer(None), ROW_OF_CODE) == "def f(x):\n"
    assert render_row(Tokenizer(None), {**ROW_OF_CODE, "completion_prefix": ""}) == "Question: Write f.\nAnswer:"
