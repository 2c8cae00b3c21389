"""Rows from every format, with any column names, and what is said about files that cannot be used."""

import csv
import datetime
import decimal
import gzip
import json

import pytest

from lora_grpo.config.schema import DataConfig
from lora_grpo.errors import UserError
from lora_grpo.tasks import columns_of, fingerprint, get_task, gsm8k, load_split, mbpp, read_rows

ROWS = [
    {"question": 'Ann says "2, or 3?"', "answer": "so\n#### 5"},
    {"question": "What is 1,000 + 1?\r\nThink.", "answer": "1,001"},
    {"question": "naïve\u2028½?", "answer": "-0.5"},
]
PROBLEMS = [
    {"task_id": 601 + i, "text": f"Add {i}.", "code": f"def add(x):\n    return x + {i}\n", "test_list": tests}
    for i, tests in enumerate((["assert add(1) == 1", "assert add(2) == 2"], ["assert add(1) == 2, 'one'"]))
]


def write(path, rows):
    """Write rows in the format of the suffix."""
    if path.name.endswith((".csv", ".csv.gz")):
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "wt", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


FORMATS = ["mine.jsonl", "mine.jsonl.gz", "mine.csv", "mine.csv.gz", "mine.parquet"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path, name):
    expected = [{"id": f"mine/{i}", **row} for i, row in enumerate(ROWS)]
    source = write(tmp_path / name, ROWS)
    assert gsm8k.load("train", source) == expected
    renamed = write(tmp_path / name, [{"Problem text": row["question"], "solution": row["answer"]} for row in ROWS])
    data = DataConfig("gsm8k", renamed, columns=("question=Problem text", "answer=solution"))
    assert load_split(data, "train") == expected
    assert fingerprint(load_split(data, "train")) == fingerprint(expected)


@pytest.mark.parametrize("name", FORMATS)
def test_programs_in_every_format(tmp_path, name):
    def load(path, rows):
        """Return the rows without the columns of the file, which are texts in CSV."""
        return [row | {"loaded_row": None} for row in mbpp.load("train", write(path, rows))]

    expected = load(tmp_path / "lists.jsonl", PROBLEMS)
    assert [row["test"].count("assert") for row in expected] == [2, 1]
    assert load(tmp_path / name, PROBLEMS) == expected
    if "csv" in name:  # a list as JSON, or statements
        for text in (json.dumps, "\n".join):
            rows = [{**row, "test_list": text(row["test_list"])} for row in PROBLEMS]
            assert load(tmp_path / name, rows) == expected


def test_columns_are_those_of_the_given_source_and_its_task(tmp_path):
    source = write(tmp_path / "m.csv", [{"problem": "a?", "answer": "1"}])
    data = DataConfig("gsm8k", source, columns=("question=problem",))
    assert columns_of(data, "train") == {"question": "problem"} and columns_of(data, "eval") == {}
    data = DataConfig("mbpp", "a", "b", eval_task="humaneval", columns=("text=problem", "test=tests"))
    assert columns_of(data, "train") == {"text": "problem"} and columns_of(data, "eval") == {"test": "tests"}


def test_dates_and_decimals_become_text_and_an_index_is_dropped(tmp_path):
    record = {"question": "a?", "answer": decimal.Decimal("2.50"), "day": datetime.date(2026, 1, 2), "n": 3}
    assert gsm8k.load("train", write(tmp_path / "m.parquet", [record])) == [
        {"id": "m/0", "question": "a?", "answer": "2.50", "day": "2026-01-02", "n": 3}
    ]
    (tmp_path / "m.csv").write_text(",question,answer\n0,a?,1\n")
    assert read_rows(str(tmp_path / "m.csv"), "eval") == [{"question": "a?", "answer": "1"}]


def test_a_missing_column_lists_the_columns_and_names_the_flag(tmp_path):
    source = write(tmp_path / "mine.csv", [{"problem": "a?", "final answer": "1"}])
    for columns in ((), ("question=problm", "answer=final answer")):
        with pytest.raises(UserError, match=r"the columns are 'problem', 'final answer'; .* --data\.columns question="):
            load_split(DataConfig("gsm8k", source, columns=columns), "train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.csv", b"question,answer\n", "m.csv has no rows"),
        ("m.csv", b"What?,1\nWho?,2\n", "m.csv:2: 'question' is missing; the columns are 'What?', '1'; "),
        ("m.csv", b"question,answer\na?,1\n\nb, or c?,2\n", "m.csv:4: more or fewer cells than the 2 names"),
        ("m.csv", b'question,answer\n"a?,1\n', "m.csv:2: unexpected end of data; expected CSV"),
        ("m.csv", b"question,answer\na?,many\n", "m.csv:2: no readable number in answer 'many'"),
        ("m.csv", "question,answer\nné?,1\n".encode() + b"n\xe9?,1\n", "m.csv:3: byte 0xe9 is not UTF-8"),
        ("m.jsonl", '{"question": "né?"}\n'.encode() + b'{"question": "n\xe9?"}', "m.jsonl:2: byte 0xe9 is not UTF-8"),
        ("m.csv.gz", b"question,answer\n", "m.csv.gz cannot be read: Not a gzipped file"),
        ("m.parquet", b"question,answer\na?,1\n", "m.parquet is not a readable Parquet file: "),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        gsm8k.load("train", str(tmp_path / name))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_task_file_reads_the_same_formats_with_the_same_messages(tmp_path):
    (tmp_path / "own.py").write_text(
        "from lora_grpo.tasks import read_rows\n\ndef load(split, source):\n    return read_rows(source, split)\n\n"
        "def check(completion, row):\n    return completion == row['answer']\n"
    )
    task = get_task(str(tmp_path / "own.py"))
    for name in FORMATS:
        rows = task.load("train", write(tmp_path / name, ROWS))
        assert [(row["question"], row["answer"]) for row in rows] == [tuple(row.values()) for row in ROWS]
    (tmp_path / "m.csv").write_text("question,answer\na,b,c\n")
    with pytest.raises(UserError) as error:
        task.load("train", str(tmp_path / "m.csv"))
    assert str(error.value).startswith(f"{tmp_path / 'm.csv'}:2: more or fewer cells")
    with pytest.raises(UserError, match=r"^no train rows are given; pass .* with the recipe's --data\.train$"):
        task.load("train")
    with pytest.raises(UserError, match=r"^no eval rows are given; pass a file or a Hub dataset with --data\.eval$"):
        task.load("eval")


def test_a_config_and_a_split_of_a_hub_dataset(tmp_path, monkeypatch):
    """A folder stands in for a repository: `datasets` reads both by the same configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    entries = []
    for name in ("easy", "hard"):
        for split in ("train", "validation"):
            file = tmp_path / "own" / "sums" / name / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"question": f"{name} {split}?", "answer": "1"}) + "\n")
        files = [{"split": split, "path": f"{name}/{split}.jsonl"} for split in ("train", "validation")]
        entries.append({"config_name": name, "data_files": files})
    (tmp_path / "own" / "sums" / "README.md").write_text(f"---\n{json.dumps({'configs': entries})}\n---\n")
    for source, split, question in (
        ("own/sums:hard", "train", "hard train?"),
        ("own/sums:hard@validation", "eval", "hard validation?"),
        ("own/sums:easy@train", "eval", "easy train?"),
    ):
        assert [row["question"] for row in gsm8k.load(split, source)] == [question]
        assert read_rows(source, split)[0]["question"] == question
    for source, there in (
        ("own/sums@train", "['easy', 'hard']"),
        ("own/sums:hrad", "['easy', 'hard']"),
        ("own/sums:hard", "['train', 'validation']"),
        ("own/sums:hard@test", "['train', 'validation']"),
    ):
        with pytest.raises(UserError) as error:
            gsm8k.load("eval", source)
        assert there in str(error.value) and "pass own/sums:CONFIG@SPLIT" in str(error.value)
        assert "with --data.eval" in str(error.value) and "--eval.also" in str(error.value)
        assert "\n" not in str(error.value)
