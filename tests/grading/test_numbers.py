"""Answers that are one number: the robust, strict and flexible rules."""

import pytest

from lora_grpo.grading import numbers

STYLES = ("xml", "hashes", "think")
SOLUTION = "Half is 48/2 = <<48/2=24>>24.\nTogether 48+24 = <<48+24=72>>72.\n#### 72"


def row(answer, style="xml"):
    return {"id": "t/0", "question": "How many?", "answer": answer, "prompt_style": style}


def robust(completion, answer="18"):
    return numbers.check(completion, row(answer))


# The robust rule


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### 18", "18"),
        ("so it is 7.\n#### 18\n", "18"),
        ("<answer>18</answer>", "18"),
        (r"The answer is $\boxed{18}$.", "18"),
        (r"\boxed{\$18}", "18"),
        (r"\boxed{18\%}", "18"),
        (r"\boxed{1{,}234}", "1234"),
        (r"#### \boxed{18}", "18"),
        (r"The answer is $\boxed 18$.", "18"),
        (r"\[\boxed-18\]", "-18"),
        (r"<answer>\boxed{18}</answer>", "18"),
        ("<answer>#### 18</answer>", "18"),
        ("#### $18", "18"),
        ("#### 18 dollars", "18"),
        ("#### Janet makes 18 a day", "18"),
        ("#### 18%", "18"),
        ("#### **18**", "18"),
        ("#### 18.00", "18"),
        ("#### 018", "18"),
        ("#### 1,234", "1234"),
        ("#### $1,234,567.00", "1234567"),
        ("#### .5", "0.5"),
        ("#### -5", "-5"),
        ("#### \N{MINUS SIGN}5", "-5"),
        ("#### -$5", "-5"),
        ("#### x = 18", "18"),
        ("#### １８", "18"),
        ("#### 18<|im_end|>", "18"),
        # The last marker wins, and a model may correct itself on a later line.
        ("#### 17\nNo:\n#### 18", "18"),
        ("<answer>17</answer>\n<answer>18</answer>", "18"),
        ("\\boxed{17}\n#### 18", "18"),
        (r"<think>\boxed{17} no</think><answer>18</answer>", "18"),
        (r"\boxed{18} #### 18", "18"),
        ("#### 18\nThat was 3 steps.", "18"),
        # Headings of steps are no markers.
        ("#### Step 1: Halve.\n36/2 = 18\n#### Step 2: Say it.\nThe answer is 18.", "18"),
        ("#### **Step 3**\nThe answer is 18.", "18"),
        ("#### 18\n#### Step 3: Check.\n9+9 = 18", "18"),
        ("#### step by step, it is 18", "18"),
    ],
)
def test_correct(completion, answer):
    verdict = robust(completion, answer)
    assert verdict.passed, verdict
    assert verdict.reason == "correct"
    assert verdict.rules["robust"]


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("", "empty"),
        ("18 is what I get.", "no_answer"),
        ("18", "no_answer"),
        ("#### Step 18: Add them.", "no_answer"),
        ("#### Part 18", "no_answer"),
        (r"\boxed{18", "unclosed_answer"),
        (r"The answer is $\boxed 18", "unclosed_answer"),
        ("\\boxed 18\nand $x$", "unclosed_answer"),
        (r"$\boxed 17$ or $\boxed 18$", "conflicting_answers"),
        ("<answer>18</answer>\n<answer>", "unclosed_answer"),
        ("<answer></answer>", "unreadable_answer"),
        ("#### eighteen", "unreadable_answer"),
        ("#### nan", "unreadable_answer"),
        ("#### 1,8", "unreadable_answer"),
        ("#### 0,018", "unreadable_answer"),
        ("#### 18.0.0", "unreadable_answer"),
        ("#### 18½", "unreadable_answer"),
        ("#### ±18", "unreadable_answer"),
        (r"\boxed{\frac{18}{1}}", "unreadable_answer"),
        ("#### 18 #### 19 #### 20", "conflicting_answers"),
        ("#### 20 #### 19 #### 18", "conflicting_answers"),
        ("#### 18 or 19", "conflicting_answers"),
        ("<answer>19</answer> <answer>18</answer>", "conflicting_answers"),
        (r"\boxed{17} #### 18", "conflicting_answers"),
        ("#### 9+9", "conflicting_answers"),
        ("#### 18e0", "conflicting_answers"),
        ("#### 17", "wrong_answer"),
        ("#### 18.0001", "wrong_answer"),
        ("#### 17.999999999999999999999999999999999999", "wrong_answer"),
        ("#### -18", "wrong_answer"),
        ("#### \N{MINUS SIGN}18", "wrong_answer"),
        ("#### " + "9" * 5000, "wrong_answer"),
        ("#### 18\n#### 19", "wrong_answer"),
        ("<reasoning>#### 18</reasoning><answer>19</answer>", "wrong_answer"),
    ],
)
def test_wrong_and_why(completion, reason):
    verdict = robust(completion)
    assert verdict.reason == reason
    assert not verdict.passed


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"<answer>\(18\)</answer>", "18"),
        (r"#### \(18\)", "18"),
        (r"#### \[18\]", "18"),
        (r"\(\boxed{18}\)", "18"),
        (r"\boxed{18\ \text{cm}}", "18"),
        (r"\boxed{18\quad\mathrm{km/h}}", "18"),
        (r"#### \displaystyle 18", "18"),
        (r"#### $\displaystyle{18}$", "18"),
        (r"#### \left(18\right)", "18"),
        (r"#### \left.18\right.", "18"),  # the dot is an invisible bracket
        (r"#### \bigl(18\bigr)", "18"),
        (r"\boxed{{\bf 18}}", "18"),
        (r"\boxed{\boldsymbol{18}}", "18"),
        (r"\boxed{\textcolor{red}{18}}", "18"),
        (r"#### \underline{18}", "18"),
        (r"#### 18{}", "18"),
        (r"#### 18~cm", "18"),
        (r"#### \pounds18", "18"),
        (r"\boxed{90^\circ}", "90"),
        (r"\boxed{90^{\circ}\text{C}}", "90"),
        (r"\boxed{18\,\text{cm}^2}", "18"),
        (r"\boxed{18\text{ m}^{3}}", "18"),
        (r"#### 1,\!234", "1234"),
        (r"#### -\left(18\right)", "-18"),
        (r"#### \text{-}18", "-18"),
        (r"#### {-}18", "-18"),
    ],
)
def test_latex_that_does_not_change_the_value_is_read(completion, answer):
    assert robust(completion, answer).reason == "correct"


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (r"\boxed{\sqrt{18}}", "unreadable_answer"),
        (r"\boxed{\frac{1}{2}}", "unreadable_answer"),
        (r"#### 18^2", "unreadable_answer"),
        (r"#### m^2 = 18", "unreadable_answer"),
        (r"#### 1.8\times 10^1", "unreadable_answer"),
        (r"#### 18\cdot 1", "unreadable_answer"),
        (r"#### \overline{18}", "unreadable_answer"),
        (r"#### \cancel{17}18", "unreadable_answer"),
        (r"#### \phantom{1}18", "unreadable_answer"),
        (r"#### 18\textsuperscript{2}", "unreadable_answer"),
        (r"#### \left.18^2\right.", "unreadable_answer"),
        (r"\boxed{\text{m}^218}", "unreadable_answer"),
        (r"#### \\sqrt{18}", "unreadable_answer"),
        (r"#### 18\!000", "conflicting_answers"),
        (r"#### 1\text{8}", "conflicting_answers"),
        (r"#### 1{}8", "conflicting_answers"),
        (r"#### 1\ 8", "conflicting_answers"),
        (r"\boxed{18^{\circ 2}}", "conflicting_answers"),
        (r"#### \(17\) \(18\)", "conflicting_answers"),
        (r"#### \(17\)\text{ or }\(18\)", "conflicting_answers"),
        (r"#### \textcolor{red}{17}\color{blue}18", "conflicting_answers"),
        (r"#### -\left(18\right)", "wrong_answer"),
        (r"#### \text{-}18", "wrong_answer"),
    ],
)
def test_latex_that_changes_the_value_or_joins_two_answers_is_not_read(completion, reason):
    verdict = robust(completion)
    assert (verdict.passed, verdict.reason) == (False, reason)


# The strict and flexible rules


@pytest.mark.parametrize(
    ("style", "completion", "strict"),
    [
        ("xml", "<reasoning>r</reasoning>\n<answer>18</answer>", True),
        ("xml", "<reasoning>r</reasoning>\n<answer>18.0</answer>", True),
        ("xml", "<reasoning>r</reasoning>\n<answer>19</answer>", False),
        ("xml", "<reasoning>r</reasoning>\n<answer>$18</answer>", False),
        ("xml", "<reasoning>r</reasoning>\n<answer>18 dollars</answer>", False),
        ("xml", "<reasoning>r</reasoning>\n<answer>1,8</answer>", False),
        ("xml", "<reasoning>r</reasoning>\n<answer>18</answer>\nDone.", False),
        ("xml", "r\n#### 18", False),
        ("hashes", "r\n#### 18", True),
        ("hashes", "#### 18 #### 19 #### 20", False),
        ("hashes", "#### 17\n#### 18", False),
        ("think", "<think>r</think><answer>18</answer>", True),
        ("xml", "<think>\nr\n</think>\n\n<reasoning>r</reasoning>\n<answer>18</answer>", True),
        ("hashes", "<think>\n#### 17\n</think>\n\nr\n#### 18", True),
        ("think", "<reasoning>r</reasoning>\n<answer>18</answer>", False),
    ],
)
def test_strict_asks_for_the_rows_own_style(style, completion, strict):
    verdict = numbers.check(completion, row("18", style))
    assert verdict.rules["strict"] is strict
    assert verdict.passed or not strict


@pytest.mark.parametrize(
    ("completion", "flexible"),
    [
        ("The answer is 18.", True),
        ("It is $18", True),
        ("17, no, 18", True),
        ("18 eggs in 3 boxes", False),
        ("It is 1,8", True),  # This rule strips all commas, like lm-eval, so it is not the main rule.
        ("It is 18.0", False),
        ("eighteen", False),
        ("18 ...", False),
        ("", False),
    ],
)
def test_flexible_is_lm_evals_last_number(completion, flexible):
    assert robust(completion).rules["flexible"] is flexible


# Reference answers


@pytest.mark.parametrize("answer", ["72", "1,234", "-10", "0.5", "$5 in all", SOLUTION, "He owes it.\n#### -47"])
@pytest.mark.parametrize("style", STYLES)
def test_the_gold_completion_passes_every_rule(answer, style):
    gold = row(answer, style)
    verdict = numbers.check(numbers.gold(gold), gold)
    assert verdict.rules == {"strict": True, "flexible": True, "robust": True}


def test_the_gold_completion_leaves_calculator_notes_out():
    assert numbers.gold({"answer": SOLUTION}) == (
        "<reasoning>\nHalf is 48/2 = 24.\nTogether 48+24 = 72.\n</reasoning>\n<answer>\n72\n</answer>"
    )
