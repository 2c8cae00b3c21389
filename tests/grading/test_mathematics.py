"""Mathematics graded by math-verify, in a process that can be killed."""

import random
from fractions import Fraction

import pytest

from lora_grpo.grading import mathematics


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine may take longer than the five seconds of a comparison."""
    monkeypatch.setattr(mathematics._is_equal, "_seconds", 60.0)


def check(answer, completion):
    return mathematics.check(completion, {"id": "a", "answer": answer})


@pytest.mark.parametrize(
    ("answer", "completion", "passed", "reason"),
    [
        ("\\frac{3}{4}", "The answer is $\\boxed{0.75}$.", True, "correct"),
        ("\\frac{3}{4}", "<answer>\n$\\frac34$\n</answer>", True, "correct"),
        ("\\frac{3}{4}", "<answer>$\\boxed{3/4}$</answer>", True, "correct"),
        ("2\\sqrt{3}", "#### \\sqrt{12}", True, "correct"),
        ("2", "#### Step 2", False, "no_answer"),
        ("-1, 1", "$x=\\boxed{1}$ or $x=\\boxed{-1}$", True, "correct"),
        ("(1,2]", "\\boxed{(1, 2]}", True, "correct"),
        ("90^\\circ", "\\boxed{90}", True, "correct"),
        ("\\text{Evelyn}", "\\boxed{Evelyn}", True, "correct"),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", True, "correct"),
        ("4", "\\boxed{5}\nNo: \\boxed{4}", True, "correct"),
        ("4", "\\boxed{4}\nNo: \\boxed{5}", False, "wrong_answer"),
        ("4", "\\boxed{3} or \\boxed{4}", False, "wrong_answer"),
        ("4", "<answer>3 or 4</answer>", False, "wrong_answer"),
        ("4", "<answer>4 or 3</answer>", False, "wrong_answer"),
        ("4", "\\boxed{1,2,3,4,5}", False, "wrong_answer"),
        ("\\text{Evelyn}", "\\boxed{Evelyn or Ann}", False, "wrong_answer"),
        ("4", "The answer is 4.", False, "no_answer"),
        ("4", "\\boxed{4", False, "unclosed_answer"),
        ("4", "<answer>4", False, "unclosed_answer"),
        ("4", "", False, "empty"),
        ("4", f"\\boxed{{{'4 ' * 1000}}}", False, "unreadable_answer"),
    ],
)
def test_all_of_the_last_answer_must_be_equal(answer, completion, passed, reason):
    verdict = check(answer, completion)
    assert (verdict.passed, verdict.reason) == (passed, reason)


def pairs(seed):
    """Yield ten pairs of answers in different notations, and whether they are equal."""
    draw = random.Random(seed).randint
    value = Fraction(draw(1, 60), draw(2, 12))
    factor = draw(2, 9)
    root = (2, 3, 5, 7)[draw(0, 3)]
    shift = draw(1, 9)
    larger = value + Fraction(1, draw(5, 20))
    reference = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    yield reference, f"{value.numerator * factor}/{value.denominator * factor}", True
    yield reference, f"\\dfrac{{{larger.numerator}}}{{{larger.denominator}}}", False
    yield f"{factor}\\sqrt{{{root}}}", f"\\sqrt{{{factor * factor * root}}}", True
    yield f"{factor}\\sqrt{{{root}}}", f"\\sqrt{{{factor * root}}}", False
    yield f"(x-{factor})(x+{shift})", f"x^2 + {shift - factor}x - {factor * shift}".replace("+ -", "- "), True
    yield f"(x-{factor})(x+{shift})", f"x^2 + {shift + factor}x - {factor * shift}", False
    yield f"\\{{{shift}, {shift + factor}\\}}", f"\\{{{shift + factor}, {shift}\\}}", True
    yield f"({shift}, {shift + factor}]", f"[{shift}, {shift + factor}]", False
    yield f"{1000 * factor + shift}", f"{factor},00{shift}", True
    yield f"{shift}, {shift + factor}", f"{shift}, {shift + factor}, {shift + factor + 1}", False


@pytest.mark.parametrize("seed", range(50))
def test_notation_does_not_matter_and_values_do(seed):
    for reference, answer, equal in pairs(seed):
        verdict = check(reference, f"The answer is $\\boxed{{{answer}}}$.")
        assert (verdict.passed, verdict.extracted) == (equal, answer), (reference, answer)


def test_an_answer_that_takes_forever_is_stopped_and_the_next_one_graded(monkeypatch):
    monkeypatch.setattr(mathematics._is_equal, "_seconds", 1.0)
    assert check("4", "\\boxed{9^{9^{9^{9}}}}").reason == "timeout"
    monkeypatch.setattr(mathematics._is_equal, "_seconds", 60.0)
    assert check("4", "\\boxed{4}").passed
