"""Mathematics graded by math-verify, in a process that can be killed."""

import json
from pathlib import Path

import pytest

from lora_grpo.config import RunConfig, replace
from lora_grpo.errors import UserError
from lora_grpo.tasks import chat, get_task, load_data, mathematics
from lora_grpo.tasks.workers import TooSlow, Worker

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
        assert chat.read_completion(completion, style)[1] == answer
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
