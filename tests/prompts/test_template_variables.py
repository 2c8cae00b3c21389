"""Variables of chat templates: how they are parsed, written into the template, and read by other programs."""

import pytest
from helpers.gguf_models import published_template, qwen_tokenizer

from lora_grpo.prompts.chat import render
from lora_grpo.prompts.template_variables import (
    THINKING_TOKENS,
    parse_kwargs,
    set_variables,
    variables,
    with_fixed_variables,
)

QWEN3 = published_template("qwen3")
THINKS = "<|im_start|>assistant\n"
DOES_NOT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
ASKED = [{"role": "user", "content": "1 + 1?"}]
AS_A_PROMPT = {"tokenize": False, "add_generation_prompt": True}


@pytest.mark.parametrize(
    ("new_values", "max_tokens", "ending", "reason"),
    [
        ({}, THINKING_TOKENS - 1, DOES_NOT, "off, because completions have at most 2047 tokens, and 2048 leave room"),
        ({}, THINKING_TOKENS, THINKS, "on, because completions have at most 2048 tokens"),
        ({"enable_thinking": True}, 8, THINKS, "on, because --model.chat-template-kwargs sets enable_thinking"),
        ({"enable_thinking": False}, 9999, DOES_NOT, "off, because --model.chat-template-kwargs sets enable_thinking"),
    ],
)
def test_the_length_of_a_completion_decides_whether_a_hybrid_model_thinks(
    new_values, max_tokens, ending, reason, capsys
):
    tokenizer = qwen_tokenizer(QWEN3)
    assert set_variables(tokenizer, new_values, max_tokens) == {"enable_thinking": ending == THINKS}
    assert render(tokenizer, ASKED).endswith(ending)
    # Programs that know nothing of the kit render the same, unless they pass another value.
    prompt = tokenizer.apply_chat_template(ASKED, **AS_A_PROMPT)
    assert prompt == render(tokenizer, ASKED)
    assert tokenizer.apply_chat_template(ASKED, **AS_A_PROMPT, enable_thinking=ending != THINKS) != prompt
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"thinking: {reason}")


def test_what_a_template_says_stays_unless_another_value_is_given(capsys):
    tokenizer = qwen_tokenizer(QWEN3)
    set_variables(tokenizer, {"enable_thinking": True}, 8)
    template_that_thinks = tokenizer.chat_template
    assert set_variables(tokenizer, {}, 8) == {"enable_thinking": True}
    assert tokenizer.chat_template == template_that_thinks
    assert "on, because its chat template sets enable_thinking" in capsys.readouterr().err
    set_variables(tokenizer, {"enable_thinking": False}, 8)
    assert tokenizer.chat_template == template_that_thinks.replace("true", "false", 1)


def test_a_fixed_template_ignores_what_a_server_passes():
    tokenizer = qwen_tokenizer(QWEN3)
    set_variables(tokenizer, {}, 8)
    expected = render(tokenizer, ASKED)
    tokenizer.chat_template = with_fixed_variables(tokenizer.chat_template)
    assert tokenizer.apply_chat_template(ASKED, **AS_A_PROMPT, enable_thinking=True) == expected
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
    tokenizer = qwen_tokenizer("\n{{ level | tojson }}")
    parsed = parse_kwargs([f"level={text}"])
    assert parsed == {"level": value} and type(parsed["level"]) is type(value)
    expected = tokenizer.apply_chat_template(ASKED, tokenize=False, level=value)
    set_variables(tokenizer, parsed, 8)
    assert render(tokenizer, ASKED) == expected
    assert variables(tokenizer.chat_template)["level"] == value


def test_a_prompt_does_not_depend_on_the_date():
    template = published_template("llama3_2")
    assert "strftime_now" in template
    tokenizer = qwen_tokenizer(template)
    assert "\nToday Date: 26 Jul 2024\n" in render(tokenizer, ASKED)
    set_variables(tokenizer, {"date_string": "1 May 2025"}, 8)
    assert "\nToday Date: 1 May 2025\n" in render(tokenizer, ASKED)
