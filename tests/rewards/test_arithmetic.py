"""The equations of numbers that a text contains, and the reward for those that hold."""

import pytest

from lora_grpo.rewards import functions
from lora_grpo.rewards.arithmetic import equations


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("She has 3 * 4 = 12 eggs.", {"3*4=12": True}),
        ("3 * 4 = 13", {"3*4=13": False}),
        ("$48/2 = $24", {"$48/2=$24": True}),
        ("1,200 + 1 = 1,201 people", {"1,200+1=1,201": True}),
        ("12 x 5=60 and 6×7 = 42", {"12x5=60": True, "6×7=42": True}),
        ("2 * 3 = 6 + 4 = 10", {"2*3=6": True, "6+4=10": True}),
        ("2 + 2 = 4. 5 * 5 = 26.", {"2+2=4": True, "5*5=26": False}),
        ("20 * 50% = 10, 10 / 40 = 25%", {"20*50%=10": True, "10/40=25%": True}),
        ("1 - 1/3 = 2/3, 1 - 1/3 = 1/3", {"1-1/3=2/3": True, "1-1/3=1/3": False}),
        ("10 / 3 = 3.33, 10 / 3 = 3.3", {"10/3=3.33": True, "10/3=3.3": True}),
        ("10 / 3 = 3.34", {"10/3=3.34": False}),
        ("10 / 3 = 3", {"10/3=3": False}),
        ("-3 * (2 - 5) = 9", {"-3*(2-5)=9": True}),
        ("1 / 0 = 5", {"1/0=5": False}),
        ("- 3*4 = 12\n * 2 + 2 = 4\n-3 + 4 = 1", {"3*4=12": True, "2+2=4": True, "-3+4=1": True}),
        ("7 - 7 = -0", {"7-7=-0": True}),
    ],
)
def test_an_equation_holds_if_its_result_is_the_value_of_its_expression(text, found):
    assert dict(equations(text)) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = 12",
        "12 = 12",
        "10% = 10",
        "5 apples * 2 = 10",
        "2x + 3 = 7",
        "2 ** 3 = 8",
        "7 // 2 = 3",
        "3 + 4 == 7",
        "3 + 4 >= 7",
        "3 + 4 = seven",
        "(3 + = 7",
        "08 + 1 = 9",
        "=" * 50,
        "3 +" * 500 + " 1 = 4",
        "3 + 4 =" + " " * 50,
    ],
)
def test_what_is_no_equation_of_numbers_is_not_read(text):
    assert list(equations(text)) == []


@pytest.mark.parametrize(("text", "holds"), [("1 + 1 = " + "9" * 9000, False), ("(" * 90 + "1 + 1 = 2", None)])
def test_long_numbers_and_nested_parentheses_are_harmless(text, holds):
    assert [each for _, each in equations(text)] == [holds] * (holds is not None)


def test_the_reward_is_the_fraction_of_different_equations_that_hold():
    texts = ["3 * 4 = 12 and 12 + 1 = 14", "no equation", "1 + 1 = 2, 1 + 1 = 2, 1 + 1 = 2, 3 + 3 = 7"]
    assert functions.right_equations(texts) == [0.5, 0.0, 0.5]
    chat = [[{"role": "assistant", "content": "<think>2 + 2 = 4</think>4"}]]
    assert functions.right_equations(chat) == [1.0]
