import json

import pytest

from lora_grpo.errors import UserError
from lora_grpo.tasks.registry import get_task

prompts = get_task("prompts")


@pytest.fixture
def source(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def load(path, limit=None, seed=0):
    return [row["question"] for row in prompts.load("train", path, limit, seed)]


def test_a_text_file_has_one_prompt_a_line(source):
    path = source("mine.txt", "Write a haiku.\n\n  Tell a joke. \r\n{not json}\n")
    assert prompts.load("train", path, None, 0) == [
        {"id": "mine/1", "question": "Write a haiku.", "answer": ""},
        {"id": "mine/3", "question": "Tell a joke.", "answer": ""},
        {"id": "mine/4", "question": "{not json}", "answer": ""},
    ]


@pytest.mark.parametrize("key", ["prompt", "question", "text"])
def test_json_lines_have_one_of_three_keys(source, key):
    path = source("mine.jsonl", json.dumps({key: "Hi\nthere", "other": 3}) + "\n\n" + json.dumps({key: "2"}) + "\n")
    assert load(path) == ["Hi\nthere", "2"]


def test_an_empty_key_gives_way_to_the_next(source):
    assert load(source("mine.jsonl", '{"prompt": " ", "text": "Hi"}')) == ["Hi"]


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\x0c"])
def test_only_a_newline_ends_a_line(source, separator):
    line = json.dumps({"prompt": f"a{separator}b"}, ensure_ascii=False)
    assert load(source("mine.jsonl", f"{line}\n{line}\n")) == [f"a{separator}b"] * 2
    assert load(source("mine.txt", f"a{separator}b\n")) == [f"a{separator}b"]


@pytest.mark.parametrize(("name", "line"), [("mine.jsonl", '{"prompt": "Hi"}'), ("mine.txt", "Hi")])
def test_a_byte_order_mark_is_not_part_of_the_prompt(source, name, line):
    assert load(source(name, "\ufeff" + line)) == ["Hi"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine.jsonl", '{"prompt": "a"}\nnot json\n', "mine.jsonl:2: not JSON; expected one object"),
        (
            "mine.jsonl",
            '{"prompt": "a"}\n\n{"promt": "b"}\n',
            "mine.jsonl:3: none of prompt, question, text is",
        ),
        ("mine.jsonl", '{"prompt": 5}\n', "mine.jsonl:1: none of"),
        ("mine.jsonl", '["a"]\n', "mine.jsonl:1: none of"),
        ("mine.jsonl", "null\n", "mine.jsonl:1: none of"),
        ("mine.json", '[\n{"prompt": "a"}\n]\n', "mine.json:1: not JSON"),
        ("mine.txt", "", "no prompts; expected one per line"),
        ("mine.jsonl", "\n \n", "no rows"),
        ("mine.txt", b"\xff\xfe", "cannot be read: it is not UTF-8 text"),
    ],
)
def test_an_error_names_the_file_and_line(source, name, content, message):
    with pytest.raises(UserError) as error:
        load(source(name, content))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file or directory"):
        load(str(tmp_path / "missing.txt"))
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load(str(tmp_path))


def test_a_limit_samples_by_seed_and_keeps_order(source):
    path = source("mine.txt", "".join(f"{number:02d}\n" for number in range(20)))
    few = load(path, 5, seed=1)
    assert len(set(few)) == 5
    assert few == sorted(few) == load(path, 5, seed=1)
    assert few != load(path, 5, seed=2)
    assert load(path, 20) == load(path, 50) == load(path)


def test_without_a_source_the_starters_problems_are_load():
    rows = prompts.load("eval", None, 3, 0)
    assert rows == get_task("starter").load("eval", None, 3, 0)


def test_only_an_empty_completion_fails():
    row = {"id": "mine/1", "question": "Hi", "answer": ""}
    assert prompts.grade("Hello", row).passed
    empty = prompts.grade(" \n", row)
    assert (empty.passed, empty.reason) == (False, "empty")
    assert prompts.grade(prompts.gold_completion(row), row).passed
