"""`code-with-feedback`: its reward, and that no expected value reaches the model."""

import json
import time

import pytest

from lora_grpo import sandbox, starter
from lora_grpo.config import DataConfig, RunConfig, replace
from lora_grpo.data import gold_episodes, load_data
from lora_grpo.errors import RunError
from lora_grpo.grading import programs
from lora_grpo.models import base_model
from lora_grpo.tasks import Session, Verdict, get_task, of_object, runs_programs

NAME = "code-with-feedback"
ROW = {"id": "t/0", "question": "?", "answer": "", "entry_point": "f", "prelude": ""}
TESTS = "assert f(1) == 2\nassert f(4) == 8"
RIGHT = "def f(x):\n    return 2 * x"
WRONG = "def f(x):\n    return 7"
RAISES = "def f(x):\n    return x[0]"
SECRET = 918273
"""An expected value that no program can guess."""


def fenced(code):
    return f"```python\n{code}\n```"


def play(*programs, test=TESTS):
    """Return the text that the model reads after each program, "" if the conversation ends; and the verdict."""
    session = Session(get_task(NAME).environment, {**ROW, "test": test})
    replies = []
    for program in programs:
        messages = session.answer({"role": "assistant", "content": fenced(program)})
        replies.append("".join(message["content"] for message in messages))
    return replies, session.verdict("limit")


@pytest.mark.parametrize(("failures", "score"), [(0, 1.0), (1, 0.9), (2, 0.8)])
def test_a_program_that_passes_is_worth_less_with_each_try(failures, score):
    replies, verdict = play(*[WRONG] * failures, RIGHT)
    assert all(replies[:-1]) and replies[-1] == ""
    assert verdict.passed and verdict.value == score


@pytest.mark.parametrize("programs", [(), (WRONG,), (RIGHT, WRONG), (WRONG, RAISES, WRONG)])
def test_without_a_pass_at_the_end_there_is_no_reward(programs):
    _, verdict = play(*programs)
    assert not verdict.passed and verdict.value == 0


def test_the_model_has_three_tries():
    assert get_task(NAME).environment.constants.MAX_TURNS == 3


@pytest.mark.parametrize("program", [RIGHT, WRONG, RAISES, "def f(x): return", "def g(x)", "import os\nos._exit(0)"])
def test_the_verdict_is_that_of_a_single_turn(program):
    [single_turn] = programs.check_many([fenced(program)], [{**ROW, "test": TESTS}])
    _, verdict = play(program)
    for field in ("passed", "reason", "extracted", "detail", "tests"):
        assert getattr(verdict, field) == getattr(single_turn, field), field


@pytest.mark.parametrize(
    "test",
    [
        f"assert f(2) == {SECRET}",
        f"assert {SECRET} == f(2), 'not {SECRET}'",
        f"assert f(2) == [1, 2, {SECRET}]",
        f"assert f(2) in ({SECRET},)",
        f"assert abs(f(2) - {SECRET}) < 0.1",
        f"assert f(2).isdigit() == {SECRET}",
        f"assert {{1: {SECRET}}}[f(2)]",
        f"assert {{}}[{SECRET} if f(2) else {SECRET}]",
        f"assert f(2) + '{SECRET}' == 1",
        f"found = f(2)\nassert found == {SECRET}",
        f"assert f(\n    2\n) == {SECRET}",
        f"assert all(f(x) == y for x, y in [(2, {SECRET})])",
        f"def same(found):\n    assert found == {SECRET}, {SECRET}\nsame(f(2))",
        f"if f(2) != {SECRET}:\n    raise ValueError({SECRET})\nassert f(2)",
        f"assert f(2) and int('{SECRET}x')",
    ],
)
@pytest.mark.parametrize(
    "program", [WRONG, RAISES, "def f(x):\n    pass", "def f(x):\n    return '7'", "def g(x): pass"]
)
def test_no_expected_value_reaches_the_model(test, program):
    [reply], verdict = play(program, test=test)
    assert not verdict.passed and "`f" in reply
    assert str(SECRET) not in reply


@pytest.mark.parametrize(
    ("program", "test", "expected"),
    [
        (WRONG, TESTS, "`f(1)`"),
        ("def f(x):\n    return 2", TESTS, "`f(4)`"),
        (WRONG, "assert sorted(f(f(1))) == [2]", "`f` raises TypeError"),
        (WRONG, "assert f(1) == f(4) + 1", "`f(1)` or `f(4)`"),
        (RAISES, "assert f(1) == 2", "`f` raises TypeError"),
        ("def f(x):\n    while True: pass", "assert f(1) == 2", "too long"),
        ("def f(x) return 2", "assert f(1) == 2", "SyntaxError: expected ':' (<candidate>, line 1)"),
        ("def f(x):\n    open('/etc/passwd')", "assert f(1) == 2", "forbidden"),
        (WRONG, f"assert f({list(range(1000))}) == 2", "`f([0, 1, 2,"),
    ],
)
def test_the_model_reads_which_call_failed(program, test, expected):
    [reply], _ = play(program, test=test)
    assert expected in reply and len(reply) < 300


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def f(x):\n    raise ValueError('assert f(4) == 8')", "`f` raises ValueError."),
        ("def f(x):\n    raise AssertionError('assert f(4) == 8')", "`f` raises AssertionError."),
        ("def f(x):\n    raise type(f'Got{x}', (Exception,), {})('assert f(4) == 8')", "`f` raises Exception."),
        ("def f(x):\n    raise type('assert f(4) == 8', (Exception,), {})('')", "`f` "),
        ("def f(x):\n    raise type('', (Exception,), {})('assert f(4) == 8')", "`f` "),
    ],
)
def test_a_program_cannot_ask_whether_an_assert_is_in_the_tests(program, expected):
    [reply], _ = play(program)
    assert expected in reply and "f(4)" not in reply


def test_rows_are_those_of_the_starter_and_need_the_sandbox():
    assert runs_programs(DataConfig(task=NAME)) and runs_programs(DataConfig(eval_task=NAME))
    config = replace(RunConfig(), {"data": {"task": NAME, "prompt_style": "code", "eval_limit": 20}})
    data = load_data(config)
    assert (len(data.train), len(data.eval)) == (4000, 20)
    assert data.record["sandbox"] == sandbox.describe()
    starter_data = load_data(replace(config, {"data": {"task": "starter-code"}}))
    assert [row["prompt"] for row in data.eval] == [row["prompt"] for row in starter_data.eval]


def test_reference_programs_pass_in_the_first_turn():
    config = replace(RunConfig(), {"data": {"task": NAME, "prompt_style": "code", "eval_limit": 20}})
    model = replace(RunConfig(), {"model": {"name": str(starter.model_path())}}).model
    episodes = gold_episodes(base_model.load_tokenizer(model), load_data(config).eval)
    assert len(episodes) == 20
    for episode in episodes:
        assert (episode.turns, episode.ended_by, episode.verdict.value) == (1, "reply", 1.0)


def mbpp_row(number):
    """Return a row whose program adds the last digit of `number`, and whose test expects it for the first four."""
    return {
        "task_id": 2000 + number,
        "text": f"Add {number}.",
        "code": f"def add(x):\n    return x + {number % 4}",
        "test_list": [f"assert add(1) == {1 + number}"],
    }


def test_rows_of_a_file_have_the_columns_of_mbpp(tmp_path):
    """Rows whose own program fails are dropped, as for `mbpp`."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(mbpp_row(number)) + "\n" for number in range(5)))
    rows = get_task(NAME).load("train", str(path))
    assert [row["id"] for row in rows] == ["mbpp/2000", "mbpp/2001", "mbpp/2002", "mbpp/2003"]
    assert rows[1]["prompt"][-1]["content"].startswith("You are an expert Python programmer")
    session = Session(get_task(NAME).environment, rows[1]["loaded_row"])
    assert session.answer({"content": fenced(rows[1]["answer"])}) == []
    assert session.verdict("reply").score == 1


def test_the_sandbox_has_its_own_time_limit(monkeypatch):
    """A signal in the middle of a call would stop its processes."""
    monkeypatch.setattr("signal.setitimer", None)
    assert play(RIGHT)[1].passed


# Environments of users


class OwnTask:
    """A task whose environment waits for as many seconds as the model writes."""

    SECONDS_PER_CALL = 1.5

    def load(self, split):
        return [{"question": split}]

    class Environment:
        score = None

        def reset(self, **row):
            pass

        def reply(self, text):
            time.sleep(float(text))

        def get_reward(self):
            return Verdict(True, "own", score=self.score)


@pytest.fixture
def session_of_own_task():
    return Session(of_object("OwnTask", OwnTask).environment, {"question": "?"})


@pytest.mark.parametrize(("score", "value"), [(0.4, 0.4), (None, 1.0)])
def test_an_environment_may_return_a_verdict_with_a_score(session_of_own_task, score, value):
    session_of_own_task.environment.score = score
    verdict = session_of_own_task.verdict("reply")
    assert (verdict.reason, verdict.value) == ("own", value)


def test_a_score_above_1_stops_the_run(session_of_own_task):
    session_of_own_task.environment.score = 2
    with pytest.raises(RunError):
        session_of_own_task.verdict("reply")


def test_the_time_limit_is_the_tasks(session_of_own_task):
    assert session_of_own_task.answer({"content": "0"}) == []
    with pytest.raises(RunError, match=r"more than 1\.5 s"):
        session_of_own_task.answer({"content": "30"})
