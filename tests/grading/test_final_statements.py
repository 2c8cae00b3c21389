"""GSM8K answers in prose, without an answer marker: which final statements count, and which near misses do not."""

import time

import pytest

from lora_grpo.grading import numbers

STORY = "Tom pays for the pastries at a party and the farmers' market, selling eggs, apples and boxes every day. "
"""Names what the statements count."""


def graded(completion, answer="18", question=f"{STORY}How many?"):
    return numbers.check(completion, {"id": "t/0", "question": question, "answer": answer})


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        # The answer is N.
        ("The answer is 18.", "18"),
        ("So, the answer is 18.", "18"),
        ("The answer is: **$18**", "18"),
        ("**Final Answer:** 18\n", "18"),
        ("The final answer is \\(18\\)", "18"),
        ("$$\\text{Total} = 18$$", "18"),
        ("The answer is: $$18$$", "18"),
        ("_The answer is `18`._", "18"),
        ("18 apples is the final answer.", "18"),
        ("The answer is: 18\n\nThe answer is: 18\n", "18"),
        ("<think>Is it 17? No.</think>\nThe answer is 18.", "18"),
        # Numbers and units
        ("The answer is $1,000.", "1000"),
        ("The answer is 1{,}000.", "1000"),
        ("The answer is −5.", "-5"),
        ("The answer is １８.", "18"),
        ("The answer is .5.", "0.5"),
        ("The total cost equals $1,234.50.", "1234.5"),
        ("The answer is 18 miles per hour.", "18"),
        ("The area is 18 m².", "18"),
        ("The area is 18 m^2.", "18"),
        ("The answer is 18 (dollars).", "18"),
        # Other subjects
        ("The cost of the order is $29.00.", "29"),
        ("First, 3 * 6 = 18.\nx = 18.", "18"),
        ("Tom is 18 years old.", "18"),
        ("The number of eggs that she sells is therefore 18.", "18"),
        # Conclusions
        ("She sells 16 - 7 = 9 eggs.\nShe makes 9 * 2 = 18 dollars.\nSo she makes $18 every day.", "18"),
        ("Thus, there are 18 apples left.", "18"),
        ("This means that she has 18 eggs.", "18"),
        ("So, together, Toulouse, Charleston, and Seattle have 260 apples.", "260"),
    ],
)
def test_a_final_statement_counts(completion, answer):
    question = f"{STORY}How many miles per hour?"
    verdict = graded(completion, answer, question)
    assert (verdict.passed, verdict.reason, verdict.read_from) == (True, "correct", "statement")
    wrong = graded(completion, f"{answer}7", question)
    assert (wrong.passed, wrong.reason, wrong.read_from) == (False, "wrong_answer", "statement")


@pytest.mark.parametrize(
    "completion",
    [
        # No statement
        "18",
        "**18**",
        "There are 18 apples.",
        "It is 18.",
        "A: 18.",
        "So, 18.",
        "print(18)",
        # Not closed
        "The answer is 18",
        "The answer is 18,",
        "The answer is 18...",
        "The answer is **18",
        "The total is 18. Then we",
        "So she has 18 eggs left. She then sells them for",
        # Hedges, negations, conditions, questions
        "The answer is about 18.",
        "The answer is not 18.",
        "Is the answer 18?",
        "I think the answer is 18.",
        "The answer might be 18.",
        "If she sells all, the answer is 18.",
        "The answer is at least 18.",
        "x > 18.",
        # Several answers
        "The answer is 18 or 19.",
        "The answer is 15-18.",
        "The answer is 17. The answer is 18.",
        "The answer is 17.\nNo, the answer is 18.",
        "The answer is 18. Wait, no.",
        # Steps and calculations
        "First, the total is 18.",
        "So each box has 18 apples.",
        "3 * 6 = 18.",
        "x + y = 18.",
        "2x = 18.",
        # What follows the number
        "The answer is 18 thousand.",
        "The answer is 18 and a half.",
        "The answer is 18 times the price.",
        "The answer is the 18th day.",
        "The answer is 18:30.",
        "The answer is 18 rounded.",
        # Numbers that cannot be read
        "The answer is eighteen.",
        "The answer is 2^18.",
        "The answer is \\frac{18}{1}.",
        "The answer is 18½.",
        # Thoughts
        "<think>The answer is 18.",
        "<think>The answer is 18.</think>\nSo",
        "<reasoning>\nThe answer is 18.\n</reasoning>",
    ],
)
def test_a_near_miss_does_not_count(completion):
    verdict = graded(completion)
    assert not verdict.passed and verdict.extracted is None and verdict.read_from is None
    assert verdict.reason in {"no_answer", "unreadable_answer", "conflicting_answers", "unfinished_thought"}


@pytest.mark.parametrize(
    ("completion", "other", "asks"),
    [
        ("So the cost is $18 per box.", "How much does he spend?", "What is the price per box?"),
        ("The answer is 18 more.", "How many does Tom have?", "How many more does Tom have than Mary?"),
        ("The discount is 18%.", "How much does he pay?", "What percentage is the discount?"),
        ("So she sells 18 scones in total.", "How much?", "How many scones does she sell?"),
    ],
)
def test_after_the_number_only_units_and_words_of_the_question_follow(completion, other, asks):
    assert graded(completion, question=other).reason == "no_answer"
    assert graded(completion, question=f"Tom has a box. {asks}").passed
    assert graded(f"{completion}\n#### 18", question=other).read_from == "marker"


def test_a_percentage_counts_if_the_reference_is_one():
    assert graded("The answer is 18%.", "18%", "How much?").passed


@pytest.mark.parametrize("text", ["#### 18 {}", "<answer>18 {}</answer>", "\\boxed{{18 {}}}"])
def test_the_superscript_of_a_unit_is_not_part_of_the_number(text):
    for unit in ("m²", "cm³", "m^2", "ft^{2}"):
        assert graded(text.format(unit)).passed, unit
    for variable in ("x^2", "am^2", "m^21"):
        assert graded(text.format(variable)).reason == "unreadable_answer", variable
    assert graded(text.format("x²")).reason == graded(text.format("²")).reason == "unreadable_answer"


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("The answer is 17.\n#### 18", "correct"),
        (r"The answer is \boxed{18}.", "correct"),
        ("#### 17\nThe answer is 18.", "wrong_answer"),
        ("#### \nThe answer is 18.", "unreadable_answer"),
        ("<answer>17 or 18</answer>\nThe answer is 18.", "conflicting_answers"),
        ("<answer>18\nThe answer is 18.", "unclosed_answer"),
        (r"<think>\boxed{17}</think>The answer is 18.", "correct"),
    ],
)
def test_a_marker_takes_precedence(completion, reason):
    verdict = graded(completion)
    assert (verdict.passed, verdict.reason) == (reason == "correct", reason)


@pytest.mark.parametrize("space", [r"\,", "\u2009", "\u202f", "\u00a0"])
@pytest.mark.parametrize("text", [r"\boxed{{{}}}", "<answer>${}</answer>", "The answer is {}."])
def test_thin_spaces_group_digits_like_commas(text, space):
    assert graded(text.format(f"1{space}000"), "1000").extracted == "1,000"
    assert graded(text.format(f"12{space}345{space}678.50"), "12345678.5").passed
    for other in (f"1{space}8", f"1{space}0000", f"0{space}018", f"1{space}{space}000", f"1000{space}000"):
        assert graded(text.format(other), "1000000").extracted is None, other


@pytest.mark.parametrize(
    "unit", ["The answer is 18. ", "So he has 18\n", "**", "$a", " ", "is ", "#### ", "<answer>", "\\boxed{"]
)
def test_grading_takes_linear_time(unit):
    def seconds(characters):
        started = time.process_time()
        graded(unit * (characters // len(unit)) + "The answer is 18.")
        return time.process_time() - started

    assert min(seconds(400_000) for _ in range(3)) < 20 * max(min(seconds(100_000) for _ in range(3)), 0.002)
