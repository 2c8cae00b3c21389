"""Text for people: whatever it is, it stays text in Markdown."""

import pytest

from lora_grpo.files import markdown, markdown_table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a|b", "a\\|b"),
        ("<b> & `x`", "&#60;b&#62; &#38; \\`x\\`"),
        ("*_x_*", "\\*\\_x\\_\\*"),
        ("mean_length of pass@1", "mean_length of pass@1"),
        ("@everyone #12", "&#64;everyone &#35;12"),
        ("[x](http://a.b)", "[x]\\(http&#58;//a.b)"),
        ("two\nlines", "two lines"),
        ("p <0.001", "p <0.001"),
        ("a\x1b[0m \u202e \ud800, 日本語", "a\\\\x1b[0m \\\\u202e \\\\ud800, 日本語"),
    ],
)
def test_markdown_of_any_text_is_that_text(text, expected):
    assert markdown(text) == expected


def test_a_table_aligns_numbers_to_the_right_and_two_columns_of_text_to_the_left():
    assert markdown_table(["", "a|b", "c"], [("x", "1", "2")]) == [
        "|  | a\\|b | c |", "|---|---:|---:|", "| x | 1 | 2 |", "",
    ]  # fmt: skip
    assert markdown_table(["a", "b"], [])[1] == "|---|---|"
    assert markdown_table(["a", "b", "c"], [], left=2)[1] == "|---|---|---:|"
