"""Prompt styles: completions are written and read back, and what leaves the format is not read."""

from typing import get_args

import pytest

from lora_grpo.config import PromptStyle
from lora_grpo.prompts import styles
from lora_grpo.prompts.styles import read_completion, write_completion


def test_every_style_that_settings_can_name_has_a_prompt_and_a_form():
    names = {*get_args(PromptStyle)}
    assert styles.SYSTEM_PROMPTS.keys() == styles._COMPLETIONS.keys() == names
    assert styles.DEFAULT_STYLE in names


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
