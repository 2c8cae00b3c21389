"""A task in a user's file: its rows, prompts and verdicts, and what is said about a wrong one."""

import textwrap

import numpy
import pytest
import torch

from lora_grpo import python_objects
from lora_grpo.config import RunConfig, replace
from lora_grpo.data import load_data
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import python_file
from lora_grpo.grading import Verdict
from lora_grpo.rewards import Scorer, parse_reward_specs, resolve
from lora_grpo.runs import system_prompt
from lora_grpo.tasks import get_task, grade_all, of_object, task_files, task_sha256

LOAD = "def load(split): return [{'question': f'{split} {n}', 'n': n} for n in range(3)]\n"
CHECK = "def check(completion, row): return completion == str(row['n'])\n"


@pytest.fixture
def task(tmp_path):
    """Return a function that writes a file and returns its path and task."""

    def write(text, name="my_task.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path), get_task(str(path))

    return write


def test_rows_get_an_id_a_question_and_a_prompt(task):
    _, task_file = task(LOAD + CHECK + "SYSTEM_PROMPT = 'Count.'")
    row = task_file.load("eval")[1]
    assert row.pop("prompt") == [{"role": "system", "content": "Count."}, {"role": "user", "content": "eval 1"}]
    assert row.pop("loaded_row") == {"id": "my_task/eval/1", "question": "eval 1", "n": 1}
    assert row == {"id": "my_task/eval/1", "question": "eval 1", "answer": "", "n": 1}


def test_a_check_does_not_get_an_answer_that_load_has_not_returned(task):
    """A column with another name, such as `Answer`, must not become an empty answer, which "" would equal."""
    path, task_file = task(LOAD + "def check(completion, row): return completion == row['answer']\n")
    rows = task_file.load("train")
    with pytest.raises(RunError, match=r"my_task\.py:2: check raised KeyError: 'answer'; row my_task/train/0"):
        grade_all(path, [""], rows[:1])


def test_a_prompt_function_gives_a_text(task):
    text = """
        def load(split): return [{"n": 4}]
        def prompt(row): return f"count to {row['n']}"
        def check(completion, row): return True
    """
    _, task_file = task(text)
    assert task_file.load("train")[0]["question"] == "count to 4"


PROMPT_OF_MESSAGES = """
def prompt(row):
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "count"}]
"""


def test_a_prompt_function_gives_messages_whose_system_prompt_counts(task):
    _, task_file = task(LOAD + CHECK + PROMPT_OF_MESSAGES + "SYSTEM_PROMPT = 'Count.'")
    row = task_file.load("train")[0]
    assert [message["content"] for message in row["prompt"]] == ["Be brief.", "count"]
    assert row["question"] == "count"


PROMPT_WITH_ANOTHER_SYSTEM_PROMPT_IN_EACH_ROW = """
def prompt(row):
    return [{"role": "system", "content": row["question"]}, {"role": "user", "content": row["question"]}]
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SYSTEM_PROMPT = 'Count.'\n", "Count."),
        ("", None),
        (PROMPT_WITH_ANOTHER_SYSTEM_PROMPT_IN_EACH_ROW, None),
    ],
    ids=["one", "none", "several"],
)
def test_the_system_prompt_of_all_rows_is_recorded(task, text, expected):
    """The model card and the Modelfile have it, because nobody runs the file for them."""
    path, _ = task(LOAD + CHECK + text)
    config = replace(RunConfig(), {"data": {"task": path}, "train": {"prompts_per_step": 1}})
    data = load_data(config)
    assert data.record["system_prompt"] == expected
    assert system_prompt({"data": data.record, "config": config.to_dict()}) == expected


def test_a_record_without_data_has_no_system_prompt():
    assert system_prompt({}) is None


class Returns:
    """A task whose `check` returns the same value for every completion."""

    value = None

    def load(self, split):
        return [{"question": "?"}]

    def check(self, completion, row):
        return self.value


@pytest.mark.parametrize(
    ("value", "passed", "score"),
    [
        (True, True, None),
        (False, False, None),
        (1, True, 1.0),
        (1.0, True, 1.0),
        (0.9, False, 0.9),
        (0, False, 0.0),
        (numpy.bool_(True), True, None),
        (numpy.float32(0.5), False, 0.5),
        (torch.tensor(0.5), False, 0.5),
    ],
)
def test_what_check_returns_becomes_a_verdict(known_task, monkeypatch, value, passed, score):
    monkeypatch.setattr(Returns, "value", value)
    [verdict] = grade_all(known_task(Returns), ["x"], [{"id": "a"}])
    assert (verdict.passed, verdict.score) == (passed, score)
    assert verdict.value == (float(passed) if score is None else score)


def test_a_verdict_stays_as_it_is(known_task, monkeypatch):
    verdict = Verdict(True, "fine", detail="d")
    monkeypatch.setattr(Returns, "value", verdict)
    assert grade_all(known_task(Returns), ["x"], [{}]) == [verdict]


def test_a_score_passes_from_the_threshold_on(task):
    path, _ = task(LOAD + "THRESHOLD = 0.5\ndef check(completion, row): return float(completion)")
    assert [verdict.passed for verdict in grade_all(path, ["0.49", "0.5"], [{}, {}])] == [False, True]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"),
        (1.5, "1.5"),
        (float("nan"), "nan"),
        ("yes", "'yes'"),
        ([1.0], "[1.0]"),
        (Verdict(1, "x"), "Verdict(passed=1"),
        (Verdict(True, "x", score=5), "Verdict(passed=True"),
        (Verdict(False, None), "Verdict(passed=False, reason=None"),
        (Verdict(False, "x", extracted=18), "Verdict(passed=False"),
        (Verdict(False, "x", rules=None), "Verdict(passed=False"),
        (Verdict(False, "x", rules={"passed": True}), "Verdict(passed=False"),
    ],
)
def test_a_check_that_returns_something_else_stops_the_run_and_names_the_row(known_task, monkeypatch, value, shown):
    monkeypatch.setattr(Returns, "value", value)
    with pytest.raises(RunError) as error:
        grade_all(known_task(Returns), ["the text"], [{"id": "row 7"}])
    message = str(error.value)
    assert f"check returned {shown}" in message
    assert "row 7" in message and "the text" in message and "\n" not in message


def test_an_exception_in_check_names_the_line_and_the_row(task):
    path, _ = task(LOAD + "def check(completion, row):\n    return row['missing']\n")
    with pytest.raises(RunError, match=r"my_task\.py:3: check raised KeyError: 'missing'; row row 7"):
        grade_all(path, ["x"], [{"id": "row 7"}])


ASYNC = """
import asyncio
waiting = []

async def load(split):
    return [{"question": f"{split} {n}", "n": n} for n in range(3)]

async def prompt(row):
    return row["question"]

async def gold(row):
    return str(row["n"])

async def check(completion, row):
    waiting.append(row["n"])
    while len(waiting) < 3:  # for the checks of the other completions
        await asyncio.sleep(0)
    return 1 / float(completion) == 1 / row["n"] if completion else None
"""


def test_functions_may_be_async_and_checks_run_at_the_same_time(task):
    path, task_file = task(ASYNC)
    rows = task_file.load("train")
    assert [task_file.gold(row) for row in rows] == ["0", "1", "2"]
    assert rows[1]["prompt"][0]["content"] == "train 1"
    verdicts = grade_all(path, ["1", "2", "3"], [rows[1], rows[2], rows[2]])
    assert [verdict.passed for verdict in verdicts] == [True, True, False]
    with pytest.raises(RunError, match=r"my_task\.py:18: check raised ZeroDivisionError: .*; row my_task/train/0"):
        grade_all(path, ["1", "0", "2"], [rows[1], rows[0], rows[2]])
    with pytest.raises(RunError, match="check returned None; expected True, False"):
        task_file.check("", rows[0])


class Recorder:
    """A task that keeps the rows that its `check` gets."""

    checked_rows = []  # noqa: RUF012

    def load(self, split):
        return [{"question": "a", "m": {"x": 1}, "t": (1, 2)}, {"question": "b", "m": {"y": 2}, "z": 3}]

    def check(self, completion, row):
        self.checked_rows.append(row)
        return True


def test_training_and_evaluation_check_the_same_row(known_task, monkeypatch):
    """Rewards get the columns of all rows, but the grader gets each row as it was loaded."""
    checked_rows = []
    monkeypatch.setattr(Recorder, "checked_rows", checked_rows)
    name = known_task(Recorder)
    rows = [{**row, "task": name} for row in get_task(name).load("train")]
    for row in rows:
        get_task(name).check("x", row)
    scorer = Scorer(resolve(parse_reward_specs(["correct_answer"])), None, rows)
    assert scorer.score([row["id"] for row in rows], ["x", "x"], [[1], [1]]).rewards == [2.0, 2.0]
    assert checked_rows[:2] == checked_rows[2:]
    assert "z" not in checked_rows[2] and checked_rows[2]["m"] == {"x": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CHECK, "defines no function 'load'"),
        (LOAD, "defines neither check, Environment, agent nor AGENT"),
        (LOAD + "check = 3", "defines neither check, Environment, agent nor AGENT"),
        (LOAD + "def Environment(): pass", "expected a class"),
        (LOAD + CHECK + "SYSTEM_PROMPT = 'a',", "SYSTEM_PROMPT is ('a',); expected "),
        (LOAD + CHECK + "THRESHOLD = 'half'", "THRESHOLD is 'half'; expected "),
        (LOAD + CHECK + "THRESHOLD = -1", "THRESHOLD is "),
        (LOAD + CHECK + "THRESHOLD = 90", "THRESHOLD is "),
        (LOAD + CHECK + "THRESHOLD = float('nan')", "THRESHOLD is "),
        (LOAD + CHECK + "AUDIT_IGNORE = (1,)", "AUDIT_IGNORE is (1,); expected "),
        (LOAD + CHECK + "REWARDS = [None]", "REWARDS is [None]; expected "),
        (LOAD + CHECK + "REWARDS = 'a'", "REWARDS is 'a'; expected "),
        ("import no_such_module", "my_task.py:1: importing this file raised ModuleNotFoundError"),
        ("import no_such_module", "No module named 'no_such_module'; install it for /"),
        ("def load(split) return 1", "SyntaxError"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, message):
    (tmp_path / "my_task.py").write_text(text)
    with pytest.raises(UserError) as error:
        get_task(str(tmp_path / "my_task.py"))
    assert message in str(error.value) and "\n" not in str(error.value)


ENVIRONMENT = """
class Environment:
    def reset(self, **row): pass
    def reply(self, text): pass
    def get_reward(self): return 1
"""
WRONG_ROWS = {
    "a name that is no text": "def load(split): return [{'question': 'a', 'b': 1, 2: 3}]\n" + CHECK,
    "a prompt that is not JSON": LOAD
    + CHECK
    + """
import datetime
def prompt(row): return [{"role": "user", "content": "count", "at": datetime.datetime(2026, 1, 2)}]
""",
    "an unknown role": LOAD + CHECK + "def prompt(row): return [{'role': 'usr', 'content': 'count'}]",
    "a list as role": LOAD + CHECK + "def prompt(row): return [{'role': ['user'], 'content': 'count'}]",
    "a number in a reference": LOAD + ENVIRONMENT + "def gold(row): return [{'role': 'assistant', 'content': 5}]",
    "an exception in tools_of": LOAD + ENVIRONMENT + "    @staticmethod\n    def tools_of(row): return row['missing']",
}


@pytest.mark.parametrize("text", WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_a_wrong_row_is_one_line(tmp_path, text):
    path = tmp_path / "my_task.py"
    path.write_text(text)
    with pytest.raises(UserError, match=r"my_task\.py") as error:
        task_file = get_task(str(path))
        for row in task_file.load("train"):
            task_file.gold(task_file.with_opening(row))
    assert "\n" not in str(error.value) and "'gold'" not in str(error.value)


SYSTEM, USER, BEGUN, HINT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "count"},
    {"role": "assistant", "content": "1,"},
    {"role": "user", "content": "count to 3"},
)
TEACHER_PROMPTS = {
    "a text": ([USER], "count to 3", [HINT]),
    "messages": ([USER], [SYSTEM, HINT], [SYSTEM, HINT]),
    "with the system message of the row": ([SYSTEM, USER], "count to 3", [SYSTEM, HINT]),
    "with a system message of its own": ([{**SYSTEM, "content": "Count."}, USER], [SYSTEM, HINT], [SYSTEM, HINT]),
    "with the answer that the row has begun": ([USER, BEGUN], "count to 3", [HINT, BEGUN]),
    "with an answer of its own": ([USER], [HINT, BEGUN], [HINT, BEGUN]),
}


@pytest.mark.parametrize("has_reset", [False, True])
@pytest.mark.parametrize("case", TEACHER_PROMPTS)
def test_a_teacher_reads_its_prompt_with_what_the_row_has_around_it(task, case, has_reset):
    """The text of `reset` ends the question, also before the beginning of an answer."""
    prompt, returned, expected = TEACHER_PROMPTS[case]
    functions = f"def prompt(row): return {prompt!r}\ndef teacher_prompt(row): return {returned!r}\n"
    environment = ENVIRONMENT.replace("reset(self, **row): pass", "reset(self, **row): return ' slowly'")
    _, task_file = task(LOAD + functions + (environment if has_reset else CHECK))
    messages = task_file.teacher_prompt(task_file.with_opening(task_file.load("train")[0]))
    question = {**HINT, "content": "count to 3 slowly" if has_reset else "count to 3"}
    assert messages == [question if message == HINT else message for message in expected]


@pytest.mark.parametrize("returned", ["None", "''", "[]", "[1]", "[{'role': 'usr', 'content': 'a'}]", "row['missing']"])
def test_a_wrong_prompt_of_a_teacher_is_one_line(task, returned):
    _, task_file = task(LOAD + CHECK + f"def teacher_prompt(row): return {returned}")
    with pytest.raises(UserError, match=r"my_task\.py.*teacher_prompt") as error:
        task_file.teacher_prompt(task_file.load("train")[0])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["json", "shared_helper"])
def test_a_module_of_another_folder_does_not_replace_one_of_this_folder(tmp_path, name):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text("text = 'own'\n")
        (tmp_path / folder / f"{folder}_{name}.py").write_text(f"import {name}\n{LOAD}def check(a, row): return 1.0\n")
    if name != "json":  # which is Python's own
        get_task(str(tmp_path / "first" / f"first_{name}.py"))
    with pytest.raises(UserError, match="rename the file"):
        get_task(str(tmp_path / "second" / f"second_{name}.py"))


def test_few_shot_examples_need_a_reference(task):
    path, _ = task(LOAD + CHECK)
    with pytest.raises(UserError, match=r"--data.few-shot .* my_task\.py"):
        load_data(replace(RunConfig(), {"data": {"task": path, "few_shot": 1}, "train": {"prompts_per_step": 1}}))


def test_the_programs_that_an_agent_starts_belong_to_the_task(tmp_path):
    path = tmp_path / "with_program.py"
    arguments = ["uv", "run", "own/agent.py", "agent.mjs", "--level=1", "x" * 5000, "../outside.py"]
    path.write_text(f"{LOAD}AGENT = {arguments}\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "agent.py").write_text("import own_moves\n")
    (tmp_path / "own" / "own_moves.py").write_text("best = 1\n")
    (tmp_path / "agent.mjs").write_text("console.log(1);\n")
    (tmp_path.parent / "outside.py").write_text("")
    names = ["with_program.py", "own/agent.py", "own/own_moves.py", "agent.mjs"]
    assert task_files(str(path)) == [tmp_path / name for name in names]
    for name in names[1:]:
        before = task_sha256(str(path))
        file = tmp_path / name
        file.write_text(file.read_text() + "\n")
        assert task_sha256(str(path)) != before, name


def test_a_file_imports_the_modules_beside_it(tmp_path):
    """As in `python my_task.py`, also later and in packages."""
    (tmp_path / "own_grader.py").write_text("import own_rules\ndef same(a, b): return own_rules.clean(a) == b\n")
    (tmp_path / "own_rules").mkdir()
    (tmp_path / "own_rules" / "__init__.py").write_text("from .text import clean\n")
    (tmp_path / "own_rules" / "text.py").write_text("clean = str.strip\n")
    path = tmp_path / "with_helpers.py"
    check = """
def check(completion, row):
    import own_grader
    return own_grader.same(completion, str(row["n"]))
"""
    path.write_text(LOAD + check)
    digest_before = task_sha256(str(path))
    verdicts = grade_all(str(path), [" 1 ", "2"], [{"n": 1}, {"n": 1}])
    assert [verdict.passed for verdict in verdicts] == [True, False]
    names = ["with_helpers.py", "own_grader.py", "own_rules/__init__.py", "own_rules/text.py"]
    assert python_file.files(path) == [tmp_path / name for name in names]
    (tmp_path / "own_rules" / "text.py").write_text("clean = str.lower\n")
    assert task_sha256(str(path)) != digest_before


def test_an_object_without_source_code_is_told_from_a_built_in_task():
    namespace = {}
    exec(
        "class gsm8k:\n    def load(self, split): return []\n    def check(self, completion, row): return True",
        namespace,
    )
    objects = python_objects.Objects()
    name = objects.add("gsm8k", of_object("gsm8k", namespace["gsm8k"]), source=namespace["gsm8k"])
    with python_objects.known(objects):
        assert task_sha256(name) == "unknown"
    assert task_sha256("gsm8k") is None
