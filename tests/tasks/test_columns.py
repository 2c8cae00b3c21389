"""The columns that a user wrote reach rewards and the functions of a task file as they were written."""

import json

import pytest

from lora_grpo.config.schema import DataConfig
from lora_grpo.data import load_split
from lora_grpo.data.duplicates import unique_rows
from lora_grpo.errors import UserError
from lora_grpo.grading import Verdict
from lora_grpo.prompts import chat
from lora_grpo.rewards import Reward, Scorer
from lora_grpo.rewards.guard import GuardedReward
from lora_grpo.tasks import get_task, grade_all, instructions
from lora_grpo.tasks.columns import REWARD_ARGUMENTS

WRITTEN = {
    # entries of a row, which lora_grpo reads
    "task": "addition",
    "prompt_style": 3,
    "loaded_row": {"a": 1},
    "reset_text": "r",
    "tools": [{"name": "t"}],
    "completion_prefix": "def",
    # names of TRL's that are no arguments of rewards
    "completion": "c",
    "images": ["i"],
    "image": None,
    # any others
    "level": 2.5,
    "Unnamed: 0": 7,
    "seconds": "ten",
    "nested": [{"x": [1, None, "a"]}, True],
    "big": 2**70,
    "empty": "",
}
PROBLEM = {
    "gsm8k": {"question": "9 + 9?", "answer": 18},
    "math": {"problem": "9 + 9?", "solution": "\\boxed{18}"},
    "humaneval": {
        "task_id": "Mine/0",
        "prompt": "def add(x):\n",
        "entry_point": "add",
        "canonical_solution": "    return x + 1\n",
        "test": "def check(add):\n    assert add(1) == 2\n",
    },
    "mbpp": {
        "task_id": 601,
        "text": "Add 1.",
        "code": "def add(x):\n    return x + 1\n",
        "test_list": ["assert add(1) == 2"],
    },
}
TASK_FILE = """
import json
def load(split, source): return [json.loads(line) for line in open(source)]
def check(completion, row): return json.dumps(row, sort_keys=True) == completion
"""


class Tokenizer:
    chat_template = "{{ messages }}"


def passed_to_rewards(rows, task):
    """Return the columns that rewards get of each row."""
    columns_of_rows = []

    def record(**columns):
        columns_of_rows.append({name: values[0] for name, values in columns.items() if isinstance(values, list)})
        return [0.0]

    prompted_rows = chat.add_prompts([{**row, "task": task} for row in rows], "xml")
    scorer = Scorer([Reward("mine", 1.0, GuardedReward(record, "mine"))], Tokenizer(), prompted_rows)
    for row in prompted_rows:
        scorer.score([row["id"]], ["text"], [[1]], [Verdict(False, "wrong_answer")])
    return columns_of_rows


def task_and_rows(tmp_path, name, *columns):
    """Return a task, its rows of a file with its columns and others, and the lines of the file."""
    if name == "file":
        name = str(tmp_path / "my_task.py")
        (tmp_path / "my_task.py").write_text(TASK_FILE)
    problem = PROBLEM.get(name, {"question": "9 + 9?"})
    lines = [{**columns_of_row, **problem} for columns_of_row in columns]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return name, get_task(name).load("train", str(tmp_path / "data.jsonl")), lines


@pytest.mark.parametrize("name", [*PROBLEM, "file"])
def test_rewards_get_every_column_as_it_was_written(tmp_path, name):
    task, rows, [written] = task_and_rows(tmp_path, name, {**WRITTEN, "id": 3})
    [columns] = passed_to_rewards(rows, task)
    assert {column: columns[column] for column in written} == written
    assert columns["id"] == 3 and isinstance(rows[0]["id"], str)

    # What the prompt and the grader read is lora_grpo's.
    [prompted_row] = chat.add_prompts([{**rows[0], "task": task}], "xml")
    assert "9 + 9?" in prompted_row["question"] or "add" in prompted_row["question"]
    assert "tools" not in prompted_row and "reset_text" not in prompted_row
    assert prompted_row["prompt_style"] == "xml"
    assert prompted_row.get("completion_prefix") in (None, PROBLEM["humaneval"]["prompt"])


def test_instructions_keep_the_columns_of_their_file(tmp_path):
    written = {
        **WRITTEN,
        "id": 4,
        # the columns of IFEval
        "prompt": "Say a.",
        "instruction_id_list": ["x"],
        "kwargs": [{"n": 1, "m": None}],
        # the columns that lora_grpo adds
        "question": "another text",
        "answer": "a",
        "instructions": 1,
        "arguments": 2,
    }
    (tmp_path / "data.jsonl").write_text(json.dumps(written) + "\n")
    rows = instructions.Instructions("ifeval").load("train", str(tmp_path / "data.jsonl"))
    [columns] = passed_to_rewards(rows, "ifeval")
    assert {column: columns[column] for column in written} == written
    assert (rows[0]["id"], rows[0]["question"], rows[0]["instructions"]) == ("4", "Say a.", ["x"])
    assert rows[0]["arguments"] == [{"n": 1}]


def test_rows_without_a_column_of_others_get_none(tmp_path):
    task, rows, _ = task_and_rows(tmp_path, "gsm8k", {"task": "a", "id": 1}, {"tools": 2, "id": 2})
    first, second = passed_to_rewards(rows, task)
    assert (first["task"], first["tools"], second["task"], second["tools"]) == ("a", None, None, 2)


def test_programs_of_code_with_feedback_keep_the_columns_of_their_file(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({**PROBLEM["mbpp"], "task": "t", "prompt": "p", "id": 5}) + "\n")
    [row] = get_task("code-with-feedback").load("train", str(tmp_path / "data.jsonl"))
    [columns] = passed_to_rewards([row], "code-with-feedback")
    assert (columns["task"], columns["prompt"], columns["id"], columns["text"]) == ("t", "p", 5, "Add 1.")
    assert row["prompt"][-1]["content"].startswith("You are an expert Python programmer")


@pytest.mark.parametrize("column", ["test", "seconds"])
def test_columns_that_the_grader_of_code_with_feedback_reads_are_refused(tmp_path, column):
    (tmp_path / "data.jsonl").write_text(json.dumps({**PROBLEM["mbpp"], column: "x"}) + "\n")
    with pytest.raises(UserError, match=column):
        get_task("code-with-feedback").load("train", str(tmp_path / "data.jsonl"))


@pytest.mark.parametrize("column", sorted(REWARD_ARGUMENTS))
@pytest.mark.parametrize("name", [*PROBLEM, "file"])
def test_a_column_that_cannot_be_passed_is_refused_by_name(tmp_path, name, column):
    with pytest.raises(UserError, match=f"'{column}'.*; rename it$"):
        task_and_rows(tmp_path, name, {column: 1})


def test_a_name_that_is_not_a_text_is_refused(tmp_path):
    (tmp_path / "my_task.py").write_text("def load(split): return [{'question': 'a', 5: 1}]\ncheck = print\n")
    with pytest.raises(UserError, match="the column 5 is a int"):
        get_task(str(tmp_path / "my_task.py")).load("train")


@pytest.mark.parametrize(
    ("written_id", "row_id"),
    [
        (0, "0"),
        (7, "7"),
        ("own", "own"),
        ("7 ", "7 "),
        # These are no ids, so the row gets its number.
        ("", "my_task/train/0"),
        (None, "my_task/train/0"),
        (True, "my_task/train/0"),
        (1.0, "my_task/train/0"),
    ],
)
def test_a_check_gets_the_id_as_it_was_written(tmp_path, written_id, row_id):
    task, rows, _ = task_and_rows(tmp_path, "file", {"id": written_id, "task": "t"}, {"id": "other"})
    rows_of_check = [
        {"id": written_id, "question": "9 + 9?", "task": "t"},
        {"id": "other", "question": "9 + 9?"},
    ]
    verdicts = grade_all(task, [json.dumps(row, sort_keys=True) for row in rows_of_check], rows)
    assert [verdict.passed for verdict in verdicts] == [True, True]
    assert passed_to_rewards(rows, task)[0]["id"] == written_id
    assert rows[0]["id"] == row_id


@pytest.mark.parametrize("name", ["gsm8k", "math"])
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0, 1], ["0", "1"]),
        (["a", "b"], ["a", "b"]),
        (["a", "a"], None),
        ([1, "1"], None),  # texts
        (["a", None], None),
        ([1.0, 2.0], None),
        ([True, 2], None),
        ([[1], [2]], None),
    ],
)
def test_an_id_is_that_of_its_row_if_each_has_its_own(tmp_path, name, ids, expected):
    task, rows, _ = task_and_rows(tmp_path, name, *({"id": written_id} for written_id in ids))
    assert [row["id"] for row in rows] == (expected or ["data/0", "data/1"])
    assert [row["id"] for row in passed_to_rewards(rows, task)] == ids


def test_rows_of_a_task_file_that_differ_in_any_column_are_kept(tmp_path):
    columns = [{"task": "a"}, {"task": "b"}, {"completion_prefix": 1}, {"tools": []}, {"tools": [], "id": "repeated"}]
    task, _, _ = task_and_rows(tmp_path, "file", *columns)
    rows = unique_rows(load_split(DataConfig(task, str(tmp_path / "data.jsonl")), "train"), task)
    assert [row["id"] for row in rows] == [f"my_task/train/{index}" for index in range(4)]


def test_equal_ids_of_a_task_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="2 rows have the id '1'"):
        task_and_rows(tmp_path, "file", {"id": 1}, {"id": "1"})


SYSTEM = {"role": "system", "content": "s"}
MESSAGES = [SYSTEM, {"role": "user", "content": "count"}]


@pytest.mark.parametrize("name", ["gsm8k", "math", "file"])
def test_a_prompt_of_messages_is_what_the_model_gets(tmp_path, name):
    task, rows, _ = task_and_rows(tmp_path, name, {"prompt": MESSAGES})
    [prompted_row] = chat.add_prompts([{**rows[0], "task": task}], "xml")
    assert prompted_row["prompt"] == MESSAGES
    assert passed_to_rewards(rows, task)[0]["prompt"] == MESSAGES


@pytest.mark.parametrize("name", ["gsm8k", "math", "file"])
@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([{"role": "developer", "content": "s"}], r"prompt: message 1 .*'developer'.*'system'"),
        ([SYSTEM, {"role": "user", "content": " "}], "has no text beside the system's"),
    ],
)
def test_messages_that_ask_nothing_or_have_an_unknown_role_are_refused(tmp_path, name, messages, error):
    with pytest.raises(UserError, match=error):
        task_and_rows(tmp_path, name, {"prompt": messages})


@pytest.mark.parametrize("prompt", ["9 + 9?", None])
def test_a_prompt_that_is_the_question_or_none_is_no_other_one(tmp_path, prompt):
    _, rows, _ = task_and_rows(tmp_path, "file", {"prompt": prompt})
    assert rows[0]["question"] == "9 + 9?"


def test_a_prompt_takes_the_place_of_a_question_that_is_none(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def load(split): return [{'question': None, 'prompt': 'a'}]\ncheck = print\n")
    assert get_task(str(path)).load("train")[0]["question"] == "a"


def test_a_question_and_another_prompt_are_refused_in_a_task_file(tmp_path):
    with pytest.raises(UserError, match="row my_task/train/0 has a question and another text"):
        task_and_rows(tmp_path, "file", {"prompt": "count"})
    task, rows, _ = task_and_rows(tmp_path, "gsm8k", {"prompt": "count"})  # whose prompt is the question
    assert passed_to_rewards(rows, task)[0]["prompt"] == "count"


class PopsNumbers:
    def load(self, split):
        return [{"numbers": [1]}]

    def prompt(self, row):
        return str(row["numbers"].pop())

    def check(self, completion, row):
        return True


def test_a_prompt_function_cannot_change_the_row(known_task):
    [row] = get_task(known_task(PopsNumbers)).load("train")
    assert (row["question"], row["loaded_row"]["numbers"]) == ("1", [1])


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": None}, r"message 2 \(user\): content is None; expected a text"),
        ({"role": "assistant", "content": None}, r"message 2 \(assistant\): content is None"),
        ({"role": "tool"}, r"message 2 \(tool\): content is None"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            r"message 2 \(user\): content is a list of parts",
        ),
        ({"role": "user", "content": 5}, r"message 2 \(user\): content is 5"),
        ({"role": "human", "content": "a"}, "message 2 has the role 'human'; expected one of"),
        ({"content": "a"}, "message 2 has the role None"),
        ({"from": "human", "value": "a"}, "message 2 has the role None"),
        ("text", "message 2 is 'text'"),
        ({"role": "assistant", "content": "", "tool_calls": "f"}, "tool_calls is 'f'; expected a list"),
        ({"role": "assistant", "content": "", "tool_calls": ["f"]}, r"tool_calls\[0\] is 'f'"),
        (
            {"role": "assistant", "tool_calls": [CALL, {"function": {"name": "f", "arguments": '{"x": 1}'}}]},
            r"tool_calls\[1\]\.function\.arguments is a text; expected a dictionary",
        ),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, r"tool_calls\[0\]\.function\.arguments is None"),
    ],
)
def test_a_malformed_message_is_named(tmp_path, message, error):
    with pytest.raises(UserError, match=f"my_task.py: row my_task/train/0: prompt: .*{error}"):
        task_and_rows(tmp_path, "file", {"prompt": [{"role": "user", "content": "a"}, message]})


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (None, "gold returned None for row Conversation/train/0; expected a list of messages"),
        (
            [{"role": "system", "content": "a"}],
            "gold of row Conversation/train/0: message 1 has the role 'system'; expected one of assistant, user, tool$",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
            r"gold of row Conversation/train/0: message 2 \(assistant\): content is",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            r"gold of row .*: message 1 \(assistant\): tool_calls\[0\]\.function\.arguments is a text",
        ),
    ],
)
def test_a_malformed_message_of_a_reference_conversation_is_named(known_task, messages, error):
    class Conversation:
        def load(self, split):
            return [{"question": "a"}]

        def gold(self, row):
            return messages

        class Environment:
            def reset(self, **row):
                pass

            def reply(self, text):
                pass

            def get_reward(self):
                return 1

    task = get_task(known_task(Conversation))
    with pytest.raises(UserError, match=error):
        task.gold(task.load("train")[0])


def test_a_call_without_content_is_a_message(tmp_path):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1"},
    ]
    task, rows, _ = task_and_rows(tmp_path, "file", {"prompt": messages})
    assert rows[0]["prompt"][1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert passed_to_rewards(rows, task)[0]["prompt"] == messages


@pytest.mark.parametrize(
    "value",
    [{1}, float("nan"), b"a", object(), "\ud800", {"a": {2}}],
    ids=["set", "NaN", "bytes", "object", "half a character", "set in a dictionary"],
)
def test_a_value_that_is_not_json_is_named(known_task, value):
    class Rows:
        def load(self, split):
            return [{"question": "a", "own": value}]

        def check(self, completion, row):
            return True

    with pytest.raises(UserError, match="row Rows/train/0: the column 'own' is not JSON"):
        get_task(known_task(Rows)).load("train")


def test_renamed_columns_are_checked_too(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"q": "9 + 9?", "a": "18", "task": "own"}) + "\n")
    data = DataConfig("gsm8k", str(tmp_path / "data.jsonl"), columns=("question=q", "answer=a"))
    [columns] = passed_to_rewards(load_split(data, "train"), "gsm8k")
    assert (columns["question"], columns["answer"], columns["task"]) == ("9 + 9?", "18", "own")
    assert (columns["q"], columns["a"]) == ("9 + 9?", "18")  # as they were written


def test_a_column_that_cannot_be_passed_may_be_renamed(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompts": "9 + 9?", "answer": "18"}) + "\n")
    data = DataConfig("gsm8k", str(tmp_path / "data.jsonl"), columns=("question=prompts",))
    [columns] = passed_to_rewards(load_split(data, "train"), "gsm8k")
    assert columns["question"] == "9 + 9?"
