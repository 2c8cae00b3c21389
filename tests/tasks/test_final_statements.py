"""GSM8K answers in prose, without an answer marker: which final statements count, and which near misses do not."""

import time

import pytest

from lora_grpo.tasks import gsm8k


def graded(completion, answer="18"):
    return gsm8k.check(completion, {"id": "t/0", "question": "How many?", "answer": answer})


COUNT = [
    ("The answer is 18.", "18"),
    ("The result is 18.", "18"),
    ("The answer is **18**.", "18"),
    ("The answer is **18**", "18"),
    ("The answer is $1,000.", "1000"),
    ("So the cost of the order is $29.00.", "29"),
    ("The cost of the order is $29.00.", "29"),
    ("Total = 18.", "18"),
    ("x = 18.", "18"),
    ("3 * 6 = 18 and so on.\nTotal cost = $18.", "18"),
    ("Final answer: 18.", "18"),
    ("**Final Answer:** 18\n", "18"),
    ("**Final answer:** $18$", "18"),
    ("The final answer is $18$.", "18"),
    ("The final answer is \\(18\\).", "18"),
    ("Therefore, the total is \\[18\\]", "18"),
    ("The answer is 18\n", "18"),
    ("Therefore, Janet makes $18 every day.", "18"),
    ("So Janet makes $18 every day at the farmers' market.", "18"),
    ("She sells 16 - 7 = 9 eggs.\nShe makes 9 * 2 = 18 dollars.\nSo she makes $18 per day.", "18"),
    ("First, 3 * 6 = 18. The answer is 18.", "18"),
    ("Thus, there are 18 apples left.", "18"),
    ("In total, there are 18 boxes.", "18"),
    ("Hence 18 apples remain.", "18"),
    ("The answer is 18 dollars!", "18"),
    ("The answer is $1\\,000$.", "1000"),
    ("The answer is 1\u202f000.", "1000"),
    ("The answer is 1\xa0000 euros.", "1000"),
    ("The answer is 1{,}000.", "1000"),
    ("The answer is -5.", "-5"),
    ("The balance is -$5.", "-5"),
    ("The answer is −5.", "-5"),
    ("The answer is 18%.", "18"),
    ("The answer is １８.", "18"),
    ("The answer is 0.5.", "0.5"),
    ("The answer is .5.", "0.5"),
    ("### Answer: 18.", "18"),
    ("The number of eggs that she sells is therefore 18.", "18"),
    ("The total comes to $18.", "18"),
    ("That gives 6.\n\nThe answer is *18*.", "18"),
    ("<think>Is it 17? No.</think>\nThe answer is 18.", "18"),
    ("The total cost equals $1,234.50.", "1234.5"),
    ("The answer is 18.00.", "18"),
    ("The answer is 18 km/h.", "18"),
    ("The answer to the question is 18 apples.", "18"),
    ("This means that she has 18 eggs.", "18"),
    ("Altogether, they collected 18 cans.", "18"),
    ("So the answer is: **$18**.", "18"),
    ("The total weight is 18kg.", "18"),
    ("Therefore x = 18.", "18"),
    ("So, the answer is 18.", "18"),
    ("Therefore the final answer is **$18**.", "18"),
    ("Final Answer: **18**.", "18"),
    ("So the final answer is \\(18\\)", "18"),
    ("Answer: $18.00.", "18"),
    ("Thus, the total profit is \\$18.", "18"),
    ("Therefore, it takes 18 minutes.", "18"),
    ("So she earns a total of $18.", "18"),
    ("Her profit is therefore $18.", "18"),
    ("Answer is 18.", "18"),
    ("Total: 18 apples.", "18"),
    ("The answer comes out to 18.", "18"),
    ("Therefore, the answer to this problem is 18 dollars.", "18"),
    ("The answer is: $$18$$", "18"),
    ("$$\\text{Total} = 18$$", "18"),
    ("Thus, she makes $18 every day selling eggs.", "18"),
    ("So there were 18 people at the party.", "18"),
    ("Therefore, Tom's age is 18.", "18"),
    ("Tom is 18 years old.", "18"),
    ("Therefore the cost per person is $18.", "18"),
    ("The answer is 18 (dollars).", "18"),
    ("The answer, therefore, is 18.", "18"),
    ("So 18 is the answer.", "18"),
    ("The answer is exactly 18.", "18"),
    ("the answer is 18.", "18"),
    ("The answer must be 18.", "18"),
    ("**The answer is 18.**", "18"),
    ("_The answer is 18._", "18"),
    ("The answer is `18`.", "18"),
    ("As a result, she has 18 eggs.", "18"),
    ("Conclusion: the answer is 18.", "18"),
    ("cost of the order is $29.00.", "29"),
    ("= 18.", "18"),
    ("The answer turns out to be 18.", "18"),
    ("18 apples is the final answer.", "18"),
]
"""(completion, its answer)."""
NEAR_MISSES = [
    "18",
    "18.",
    "**18**",
    "I think maybe 18 or 19.",
    "The answer is about 18.",
    "The answer is between 18 and 20.",
    "The answer is between seventeen and 18.",
    "The answer is 18 or 19.",
    "The answer is 17, 18.",
    "The answer is 17 and 18.",
    "The answers are 6, 12 and 18.",
    "The answer is 15-18.",
    "Is the answer 18?",
    "The answer is 18?",
    "The answer is 18, right?",
    "The answer is not 18.",
    "The answer isn't 18.",
    "The answer can't be 18.",
    "First, 3 * 6 = 18.",
    "3 * 6 = 18.",
    "3 * 6 = 18",
    "First, the total is 18.",
    "The answer is 18",
    "The answer is $18",
    "So the total is 18",
    "The answer is 18 dollars",
    "The answer is 18,",
    "The answer is 18...",
    "The answer is 18…",
    "The answer is **18",
    "The answer is\n18.",
    "So she has 18 eggs left. She then sells them for",
    "The total is 18. Then we",
    "The answer is 18. Wait, no.",
    "The answer is 17. The answer is 18.",
    "The answer is 17.\nNo, the answer is 18.",
    "The answer is 1,8.",
    "The answer is 18.0.0.",
    "The answer is 1 8.",
    "The answer is 18e0.",
    "The answer is 2^18.",
    "The answer is \\sqrt{18}.",
    "The answer is \\frac{18}{1}.",
    "The answer is 18½.",
    "The answer is 9+9.",
    "The answer is 18 + x.",
    "The answer is 18 thousand.",
    "The answer is 18k.",
    "The answer is $18M.",
    "The answer is 18 and a half.",
    "The answer is 18 dozen.",
    "The answer is 18 times the price.",
    "The answer is 18 more than before.",
    "The answer is the 18th day.",
    "The answer is eighteen.",
    "The answer is at least 18.",
    "The answer is at most 18.",
    "The answer is up to 18.",
    "The answer is more than 18.",
    "The answer is nearly 18.",
    "The answer is approximately 18.",
    "The answer is approx. 18.",
    "Approx. the answer is 18.",
    "The answer is ~18.",
    "The answer is ≈ 18.",
    "x > 18.",
    "x >= 18.",
    "x <= 18.",
    "x != 18.",
    "x ≠ 18.",
    "I guess 18.",
    "I think the answer is 18.",
    "Maybe the answer is 18.",
    "The answer might be 18.",
    "The answer could be 18.",
    "The answer should be 18.",
    "It is probably 18.",
    "If she sells all, the answer is 18.",
    "Assume the answer is 18.",
    "Tom says the answer is 18.",
    "Someone said that the answer is 18.",
    "1. The answer is 18.",
    "- The answer is 18.",
    "(a) The answer is 18.",
    "There are 18 apples.",
    "Janet has 18 eggs.",
    "She sells 18 eggs.",
    "So we multiply by 18.",
    "So we divide the total by 18.",
    "So we add 18 to the total.",
    "So each box has 18 apples.",
    "So the 18 apples are eaten.",
    "So after 18 days they meet.",
    "So, 18.",
    "Since the price is 18.",
    "We know that the price is $18.",
    "Given that the total is 18.",
    "x + y = 18.",
    "2x = 18.",
    "a * b = 18.",
    "x - y = 18.",
    "The answer is 18; the other answer is 19.",
    "The answer is 18: maybe.",
    "Note: 18.",
    "Eggs: 18.",
    "A: 18",
    "A: 18.",
    "Option B18 is the answer.",
    "The answer is B18.",
    'He wrote "the answer is 18."',
    "<think>The answer is 18.",
    "<reasoning>\nThe answer is 18.",
    "<reasoning>\nThe answer is 18.\n</reasoning>",
    "<think>The answer is 18.</think>",
    "<think>The answer is 18.</think>\nSo",
    "The answer is 18. Or is it 19?",
    "The answer is 18.\n\nActually, let me check.",
    "What is 18.",
    "Half of that is 18.",
    "The answer is one of 18.",
    "The answer is seventeen, not 18.",
    "The answer is 18 (or 19).",
    "The answer is nineteen or 18.",
    "The answer is 18 plus tax.",
    "The answer is 18x.",
    "The answer is x18.",
    "print(18)",
    "The answer is 18².",
    "The answer is nan.",
    "The answer is $18.50 or so.",
    "Answer: 18",
    "Remember that the cost is $18.",
    "The answer is 18, give or take.",
    "The answer is 18-ish.",
    "The answer is 18ish.",
    "The answer is 18 at best.",
    "The answer is 18 maybe.",
    "The answer lies near 18.",
    "The answer is in the range of 18.",
    "So the answer is within 18.",
    "The answer is a multiple of 18.",
    "The answer exceeds 18.",
    "The answer is divisible by 18.",
    "The answer is anything but 18.",
    "The answer is far from 18.",
    "It is false that the answer is 18.",
    "The answer is unlikely to be 18.",
    "If we add tax, the total is 18.",
    "The answer is double 18.",
    "The answer is 18 factorial.",
    "The answer is the square root of 18.",
    "The answer is 0x18.",
    "The answer to question 18 is unknown.",
    "So far she has 18.",
    "So she had 18 at first.",
    "So on day 18.",
    "So in 18 days they finish.",
    "So the remaining 18 apples go to Tom.",
    "Therefore, 18.",
    "Total so far: 18.",
    "Subtotal: 18.",
    "The subtotal is $18.",
    "Running total: 18.",
    "Partial result: 18.",
    "The wrong answer is 18.",
    "A common mistake is 18.",
    "The upper bound is 18.",
    "The estimate is 18.",
    "The answer is 18 or so.",
    "The answer is 18, not 19.",
    "The answer is 18, I guess.",
    "The answer is 18, but I'm not sure.",
    "The answer is 18. Or 19.",
    "The answer is 19. Maybe 18.",
    "It is 17. It is 18.",
    "The total is 17. The total is 18.",
    "x = 17\nx = 18\n",
    "The answer is 17\nThe answer is 18.",
    "According to Tom, the answer is 18.",
    "Imagine the answer is 18.",
    "Try x = 18.",
    "For x = 18.",
    "Set x = 18.",
    "After that, the total is 18.",
    "Sonia makes $18.",
    "The answer is 18é.",
    "The answer is 18日.",
    "The answer is 18.5 or 18.",
    "The answer is 18!=3.",
    "The answer is 4* 18.",
    "The answer is 18 * x.",
    "The price is X-18.",
    "The meal was $18 and the tip was $",
    "The answer is 18 minutes 30 seconds.",
    "The answer is 18:30.",
    "The answer is 18.\nThe answer is 19.\nThe answer is 18.",
    "18 is not the answer.",
    "18 is the wrong answer.",
    "It turns out to be 18.",
    "The answer is option 18.",
]
"""Completions that do not state 18 as their answer, though most contain it."""


@pytest.mark.parametrize(("completion", "answer"), COUNT)
def test_a_final_statement_counts(completion, answer):
    verdict = graded(completion, answer)
    assert (verdict.passed, verdict.reason, verdict.read_from) == (True, "correct", "statement")
    wrong = graded(completion, f"{answer}7")
    assert (wrong.passed, wrong.reason, wrong.read_from) == (False, "wrong_answer", "statement")


@pytest.mark.parametrize("completion", NEAR_MISSES)
def test_a_near_miss_does_not_count(completion):
    verdict = graded(completion)
    assert not verdict.passed and verdict.extracted is None and verdict.read_from is None
    assert verdict.reason in {"no_answer", "unreadable_answer", "conflicting_answers"}


def test_the_tables_are_as_large_as_they_should_be():
    assert len(COUNT) >= 60 and len(NEAR_MISSES) >= 60


@pytest.mark.parametrize(
    "completion",
    ["#### 18", "<answer>18</answer>", r"\boxed{18}", "The answer is 17.\n#### 18", r"The answer is \boxed{18}."],
)
def test_a_marker_takes_precedence(completion):
    verdict = graded(completion)
    assert (verdict.passed, verdict.read_from) == (True, "marker")


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("#### 17\nThe answer is 18.", "wrong_answer"),
        ("#### \nThe answer is 18.", "unreadable_answer"),
        ("<answer>17 or 18</answer>\nThe answer is 18.", "conflicting_answers"),
        ("<answer>18\nThe answer is 18.", "unclosed_answer"),
        (r"<think>\boxed{17}</think>The answer is 18.", "wrong_answer"),
    ],
)
def test_a_statement_does_not_repair_a_marker(completion, reason):
    verdict = graded(completion)
    assert (verdict.passed, verdict.reason) == (False, reason)


@pytest.mark.parametrize("space", [r"\,", "\u2009", "\u202f", "\u00a0"])
@pytest.mark.parametrize(
    "text", [r"\boxed{{{}}}", "#### {}", "<answer>${}</answer>", "The answer is {}.", "Total = ${}\n"]
)
def test_thin_spaces_group_digits_like_commas(text, space):
    assert graded(text.format(f"1{space}000"), "1000").extracted == "1,000"
    assert graded(text.format(f"12{space}345{space}678.50"), "12345678.5").passed
    for other in (
        f"1{space}8",
        f"1{space}00",
        f"1{space}0000",
        f"0{space}018",
        f"1{space}{space}000",
        f"1000{space}000",
    ):
        assert graded(text.format(other), "1000000").extracted is None, other


@pytest.mark.parametrize(
    "unit", ["The answer is 18. ", "The answer is 18.\n", "So he has 18\n", "**", "$a", ". ", " ", "is "]
)
def test_grading_takes_linear_time(unit):
    def seconds(characters):
        started = time.process_time()
        graded(unit * (characters // len(unit)) + "The answer is 18.")
        return time.process_time() - started

    assert min(seconds(400_000) for _ in range(3)) < 20 * max(min(seconds(100_000) for _ in range(3)), 0.002)
