"""Errors of libraries are reported in one line that has the reason."""

import pytest

from lora_grpo.errors import first_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("\n the reason: x \nand more", "the reason: x"),
        ("validation failed:\n\n    ValueError: 0 layers\nmore", "validation failed: ValueError: 0 layers"),
        ("validation failed:", "validation failed:"),
        (" \n", "ValueError"),
    ],
)
def test_the_first_line_of_an_error_has_its_reason(message, line):
    assert first_line(ValueError(message)) == line
