"""MBPP: its rows and splits, and the grades of its 974 reference programs."""

import json

import pytest

from lora_grpo.tasks import get_task

MBPP = get_task("mbpp")
RECORD = {
    "task_id": 601,
    "text": "Write a function to double a number.",
    "code": "class Box:\r\n\tpass\r\ndef twice(x):\r\n\treturn 2 * x",
    "test_list": ["assert twice(1) == 2", "assert set([twice(2)]) == {4}"],
    "test_setup_code": "",
}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def numbered(*ids):
    return [{**RECORD, "task_id": number} for number in ids]


def ids(rows):
    return [row["id"] for row in rows]


@pytest.fixture(scope="module")
def source(real_data):
    return str(real_data / "mbpp" / "mbpp.jsonl")


def test_a_row_asks_in_words_and_asserts(tmp_path):
    setup = {"test_setup_code": "box = Box() \r\nbox.x = 1"}
    (row,) = MBPP.load("train", write(tmp_path / "m.jsonl", {**RECORD, **setup}))
    assert row.pop("loaded_row") == {"id": "mbpp/601", **RECORD, **setup}
    assert row == {
        "id": "mbpp/601",
        "question": "You are an expert Python programmer, and here is your task: Write a function to double a number. "
        "Your code should pass these tests:\n\nassert twice(1) == 2\nassert set([twice(2)]) == {4}",
        "answer": "class Box:\n\tpass\ndef twice(x):\n\treturn 2 * x",
        "entry_point": "twice",
        "functions": ["twice", "Box"],
        "test": "box = Box() \nbox.x = 1\nassert twice(1) == 2\nassert set([twice(2)]) == {4}\n",
        "prelude": "",
    }
    assert MBPP.check(MBPP.gold(row), row).passed


def test_a_module_that_the_tests_use_is_the_real_one(tmp_path):
    record = {
        **RECORD,
        "code": "import math, sys\ndef half(x):\n    return x / 2",
        "test_list": ["assert math.isclose(half(1), 0.5)"],
    }
    (row,) = MBPP.load("train", write(tmp_path / "m.jsonl", record))
    assert (row["functions"], row["prelude"]) == (["half"], "import math, sys")
    assert MBPP.check(MBPP.gold(row), row).passed
    forged = "class math:\n    isclose = staticmethod(lambda *numbers: True)\ndef half(x):\n    return x"
    assert not MBPP.check(f"```python\n{forged}\n```", row).passed


def test_upstreams_file_is_split_by_its_ids(tmp_path, capsys):
    path = write(tmp_path / "m.jsonl", *numbered(1, 10, 11, 510, 511, 600, 601, 974))
    assert ids(MBPP.load("eval", path)) == ["mbpp/11", "mbpp/510"]
    assert "used 2 of 8 rows for eval" in capsys.readouterr().err
    assert ids(MBPP.load("train", path)) == ["mbpp/601", "mbpp/974"]
    assert len(MBPP.load_all_splits(path)) == 8


@pytest.mark.parametrize("numbers", [(1, 2), (11, 12), (601, 700), (11, 601, 975), ("a", 11, 601)])
def test_any_other_file_is_read_whole(numbers, tmp_path):
    path = write(tmp_path / "m.jsonl", *numbered(*numbers))
    for split in ("train", "eval"):
        assert ids(MBPP.load(split, path)) == [f"mbpp/{number}" for number in numbers]


def test_every_row_passes_and_every_near_miss_fails(source):
    rows = MBPP.load_all_splits(source)
    assert len(rows) == 974
    verdicts = MBPP.check_many([MBPP.gold(row) for row in rows], rows)
    assert [row["id"] for row, verdict in zip(rows, verdicts, strict=True) if not verdict.passed] == []

    # Functions that return nothing fail, unless the tests expect None.
    near_misses = [f"```python\n{row['answer']}\ndef {row['entry_point']}(*_, **__):\n    pass\n```" for row in rows]
    verdicts = MBPP.check_many(near_misses, rows)
    passed_rows = [row for row, verdict in zip(rows, verdicts, strict=True) if verdict.passed]
    assert [row["id"] for row in passed_rows if "None" not in row["test"]] == []


def test_the_real_splits(source):
    assert len(MBPP.load("train", source)) == 374
    assert len(MBPP.load("eval", source)) == 500
