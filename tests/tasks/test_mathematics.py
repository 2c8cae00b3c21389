"""Mathematics graded by math-verify, in a process that can be killed."""

import json
import random
from fractions import Fraction
from pathlib import Path

import pytest

from lora_grpo.config import RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.errors import RunError, UserError
from lora_grpo.prompts import chat, styles
from lora_grpo.tasks import get_task, mathematics
from lora_grpo.workers import TooSlow, Worker

TASK = get_task("math")
ROWS = [
    {"problem": "Half of a half?", "solution": "It is $\\frac12\\cdot\\frac12=\\boxed{\\frac14}$.", "level": "Level 1"},
    {"problem": "Solve x^2=1.", "answer": "-1, 1"},
    {"question": "Who wins?", "answer": "\\text{Evelyn}"},
    {"question": "2+2?", "answer": 4},
]


def check(answer, completion):
    return TASK.check(completion, {"id": "a", "answer": answer})


@pytest.mark.parametrize(
    ("answer", "completion", "passed", "reason"),
    [
        ("\\frac{3}{4}", "The answer is $\\boxed{0.75}$.", True, "correct"),
        ("\\frac{3}{4}", "<answer>\n$\\frac34$\n</answer>", True, "correct"),
        ("\\frac{3}{4}", "<answer>$\\boxed{3/4}$</answer>", True, "correct"),
        ("2\\sqrt{3}", "#### \\sqrt{12}", True, "correct"),
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
    value, factor, root, shift = Fraction(draw(1, 60), draw(2, 12)), draw(2, 9), (2, 3, 5, 7)[draw(0, 3)], draw(1, 9)
    reference, larger = f"\\frac{{{value.numerator}}}{{{value.denominator}}}", value + Fraction(1, draw(5, 20))
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
    monkeypatch.setattr(mathematics._compare, "_seconds", 1.0)
    assert check("4", "\\boxed{9^{9^{9^{9}}}}").reason == "timeout"
    monkeypatch.setattr(mathematics._compare, "_seconds", 60.0)
    assert check("4", "\\boxed{4}").passed


def test_a_worker_reports_exceptions_and_a_process_that_ends():
    worker = Worker("os:_exit", 60.0)
    with pytest.raises(RuntimeError, match="ended"):
        worker(3)
    worker = Worker("os:listdir", 60.0)
    with pytest.raises(RuntimeError, match="FileNotFoundError"):
        worker("/no/such/folder")
    assert Path(__file__).name in worker(str(Path(__file__).parent))
    with pytest.raises(TooSlow):
        Worker("time:sleep", 0.2)(600)


def test_a_worker_imports_no_module_of_this_folder_and_says_if_it_cannot_start(tmp_path, monkeypatch):
    (tmp_path / "fractions.py").write_text("import pathlib; pathlib.Path('imported').touch()")
    monkeypatch.chdir(tmp_path)
    assert (
        Worker("fractions:gcd", 60.0, imports=["math"]) and Worker("math:gcd", 60.0, imports=["fractions"])(4, 6) == 2
    )
    assert not (tmp_path / "imported").exists()
    with pytest.raises(RunError, match="nowhere:f cannot be imported"):
        Worker("nowhere:f", 60.0)()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.mark.parametrize("style", ["xml", "hashes", "think", "boxed"])
def test_references_pass_in_every_style(path, style):
    rows = chat.add_prompts(TASK.load("eval", path), style)
    assert [row["id"] for row in rows] == ["rows/0", "rows/1", "rows/2", "rows/3"]
    for row in rows:
        completion = TASK.gold(row)
        assert TASK.check(completion, row).passed
        answer = mathematics._final_answer(row)
        assert styles.read_completion(completion, style)[1] == answer
    assert rows[0]["level"] == "Level 1" and "\\cdot" in TASK.gold(rows[0])


def test_rows_without_an_answer_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    for row, said in (({"problem": "?", "solution": "\\boxed{}"}, "rows.jsonl:1"), ({"problem": "?"}, "answer")):
        path.write_text(json.dumps(row))
        with pytest.raises(UserError, match=said):
            TASK.load("eval", str(path))


def test_benchmarks_have_no_training_rows(path):
    for name in ("math500", "aime24", "aime25"):
        with pytest.raises(UserError, match="--task math"):
            get_task(name).load("train")
        assert get_task(name).load("eval", path)


def test_a_run_may_train_on_one_file_and_be_evaluated_on_another(path, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"question": f"{n}+1?", "answer": n + 1}) + "\n" for n in range(20)))
    data = {"task": "math", "train": str(other), "eval": path, "prompt_style": "boxed"}
    loaded = load_data(replace(RunConfig(), {"data": data}))
    assert (len(loaded.train), len(loaded.eval)) == (20, 4) and "\\boxed{}" in loaded.train[0]["prompt"][0]["content"]
