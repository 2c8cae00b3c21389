"""Rows from every format, with any column names, and what is said about files that cannot be used."""

import csv
import datetime
import decimal
import gzip
import json

import pytest

from lora_grpo.config.schema import DataConfig
from lora_grpo.data import columns_of, fingerprint, load_split
from lora_grpo.errors import UserError
from lora_grpo.tasks import get_task, read_rows

GSM8K = get_task("gsm8k")
MBPP = get_task("mbpp")

ROWS = [
    {"question": 'Ann says "2, or 3?"', "answer": "so\n#### 5"},
    {"question": "What is 1,000 + 1?\r\nThink.", "answer": "1,001"},
    {"question": "naïve\u2028½?", "answer": "-0.5"},
]
PROBLEMS = [
    {
        "task_id": 601,
        "text": "Add 0.",
        "code": "def add(x):\n    return x + 0\n",
        "test_list": ["assert add(1) == 1", "assert add(2) == 2"],
    },
    {
        "task_id": 602,
        "text": "Add 1.",
        "code": "def add(x):\n    return x + 1\n",
        "test_list": ["assert add(1) == 2, 'one'"],
    },
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
    assert GSM8K.load("train", source) == expected
    own_names = [{"Problem text": row["question"], "solution": row["answer"]} for row in ROWS]
    data = DataConfig("gsm8k", write(tmp_path / name, own_names), columns=("question=Problem text", "answer=solution"))
    expected = [{**row, **own_name} for row, own_name in zip(expected, own_names, strict=True)]
    assert load_split(data, "train") == expected
    assert fingerprint(load_split(data, "train")) == fingerprint(expected)


def load_problems(path, rows):
    """Return the rows of a file without its columns, which are texts in CSV."""
    return [{**row, "loaded_row": None} for row in MBPP.load("train", write(path, rows))]


@pytest.fixture
def problems(tmp_path):
    """The rows of the problems as JSON Lines."""
    rows = load_problems(tmp_path / "lists.jsonl", PROBLEMS)
    assert [row["test"].count("assert") for row in rows] == [2, 1]
    return rows


@pytest.mark.parametrize("name", FORMATS)
def test_programs_in_every_format(tmp_path, problems, name):
    assert load_problems(tmp_path / name, PROBLEMS) == problems


@pytest.mark.parametrize("name", ["mine.csv", "mine.csv.gz"])
@pytest.mark.parametrize("text_of", [json.dumps, "\n".join], ids=["JSON", "statements"])
def test_a_list_of_tests_in_csv_is_json_or_statements(tmp_path, problems, name, text_of):
    rows = [{**row, "test_list": text_of(row["test_list"])} for row in PROBLEMS]
    assert load_problems(tmp_path / name, rows) == problems


def test_columns_are_those_of_the_given_source_and_its_task(tmp_path):
    source = write(tmp_path / "m.csv", [{"problem": "a?", "answer": "1"}])
    data = DataConfig("gsm8k", source, columns=("question=problem",))
    assert columns_of(data, "train") == {"question": "problem"} and columns_of(data, "eval") == {}
    data = DataConfig("mbpp", "a", "b", eval_task="humaneval", columns=("text=problem", "test=tests"))
    assert columns_of(data, "train") == {"text": "problem"} and columns_of(data, "eval") == {"test": "tests"}


def test_a_renamed_column_replaces_no_other_one(tmp_path):
    columns = ("answer=solution",)
    source = write(tmp_path / "m.jsonl", [{"question": "a?", "answer": "1", "solution": "so\n#### 2"}])
    with pytest.raises(UserError, match=r"m\.jsonl:1: --data\.columns answer=solution would replace .*'answer'"):
        load_split(DataConfig("gsm8k", source, columns=columns), "train")

    # The same value may have both names, and two names may be exchanged.
    source = write(tmp_path / "m.jsonl", [{"question": "a?", "answer": "1", "solution": "1"}])
    [row] = load_split(DataConfig("gsm8k", source, columns=columns), "train")
    assert (row["answer"], row["solution"]) == ("1", "1")
    source = write(tmp_path / "m.jsonl", [{"question": "1", "answer": "a?"}])
    [row] = load_split(DataConfig("gsm8k", source, columns=("question=answer", "answer=question")), "train")
    assert (row["question"], row["answer"]) == ("a?", "1")


def test_dates_and_decimals_become_text_and_an_index_is_dropped(tmp_path):
    record = {"question": "a?", "answer": decimal.Decimal("2.50"), "day": datetime.date(2026, 1, 2), "n": 3}
    assert GSM8K.load("train", write(tmp_path / "m.parquet", [record])) == [
        {"id": "m/0", "question": "a?", "answer": "2.50", "day": "2026-01-02", "n": 3}
    ]
    (tmp_path / "m.csv").write_text(",question,answer\n0,a?,1\n")
    assert read_rows(str(tmp_path / "m.csv"), "eval") == [{"question": "a?", "answer": "1"}]


def test_values_of_parquet_files_are_those_that_were_written(tmp_path):
    """Text may have been written as bytes, which must not become "b'...'": long texts would all be the same."""
    import pyarrow
    import pyarrow.parquet

    text = "A shop sells naïve ½ plums. " * 20
    day = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)
    parts_type = pyarrow.list_(pyarrow.struct({"a": pyarrow.binary(), "b": pyarrow.list_(pyarrow.int8())}))
    columns = {  # the written values of two rows, their type, and the values that are read
        "question": ([f"{text}0".encode(), f"{text}1".encode()], pyarrow.binary(), [f"{text}0", f"{text}1"]),
        "answer": ([b"1", b"2"], pyarrow.large_binary(), ["1", "2"]),
        "fixed": ([b"ab", b"cd"], pyarrow.binary(2), ["ab", "cd"]),
        "kind": (["x", "y"], pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), ["x", "y"]),
        "large": (["x", None], pyarrow.large_string(), ["x", None]),
        "price": ([decimal.Decimal("2.50"), None], pyarrow.decimal128(30, 2), ["2.50", None]),
        "day": ([day, None], pyarrow.timestamp("us"), ["2026-01-02 03:04:05.678901", None]),
        "took": ([datetime.timedelta(days=1), None], pyarrow.duration("s"), ["1 day, 0:00:00", None]),
        "big": ([2**63 - 1, -(2**53) - 1], pyarrow.int64(), [2**63 - 1, -(2**53) - 1]),
        "bigger": ([2**64 - 1, 0], pyarrow.uint64(), [2**64 - 1, 0]),
        "half": ([1.5, None], pyarrow.float32(), [1.5, None]),
        "flag": ([True, None], pyarrow.bool_(), [True, None]),
        "parts": ([[{"a": b"x", "b": [1, None]}], []], parts_type, [[{"a": "x", "b": [1, None]}], []]),
        "pairs": ([[("a", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int8()), [[["a", 1]], []]),
        "nothing": ([None, None], pyarrow.null(), [None, None]),
    }
    arrays = {name: pyarrow.array(written, type=kind) for name, (written, kind, _) in columns.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), tmp_path / "m.parquet")
    first, second = read_rows(str(tmp_path / "m.parquet"), "train")
    for name, (_, _, expected) in columns.items():
        assert [first[name], second[name]] == expected, name
    assert first.keys() == second.keys() == columns.keys()
    questions = [row["question"] for row in GSM8K.load("train", str(tmp_path / "m.parquet"))]
    assert questions == [f"{text}0", f"{text}1"]


def test_a_name_that_occurs_twice_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table([["a?"], ["1"], ["2"]], names=["question", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "m.parquet")
    with pytest.raises(UserError, match=r"m\.parquet .*(Multiple matches|duplicate field)"):
        GSM8K.load("train", str(tmp_path / "m.parquet"))
    with pytest.raises(UserError, match="question is 'q' already"):
        columns_of(DataConfig("gsm8k", "m.csv", columns=("question=q", "question=p")), "train")


def test_a_column_that_rows_cannot_have_is_named(tmp_path):
    source = write(tmp_path / "m.parquet", [{"question": "a?", "answer": "1", "photo": b"\x89PNG"}])
    for read in (lambda: GSM8K.load("train", source), lambda: read_rows(source, "train")):
        with pytest.raises(UserError, match=r"m\.parquet row 0: the column 'photo' is not text or numbers"):
            read()


def test_numbers_and_empty_texts_of_json_lines_are_those_that_were_written(tmp_path):
    line = '\ufeff{"question": "a?", "answer": 18, "big": 123456789012345678901, "small": 1e-7, "empty": "", "n": null}'
    (tmp_path / "m.jsonl").write_text(line + "\n", encoding="utf-8")
    (row,) = GSM8K.load("train", str(tmp_path / "m.jsonl"))
    assert row["answer"] == "18" and row["loaded_row"]["answer"] == 18
    assert (row["big"], row["small"], row["empty"], row["n"]) == (123456789012345678901, 1e-7, "", None)


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
        ("m.csv", b"question;answer\na, b?;1\n", "m.csv:1: semicolons separate the columns; save the file with commas"),
        ("m.csv", b"question\tanswer\na?\t1\n", "m.csv:1: tabs separate the columns; save the file with commas"),
        ("m.csv", b'question,answer\n"a?,1\n', "m.csv:2: unexpected end of data; expected CSV"),
        ("m.csv", b"question,answer\na?,many\n", "m.csv:2: no readable number in answer 'many'"),
        ("m.csv", b"question,answer\na?,Paris\n", "; for answers that are no numbers, write a task file"),
        ("m.csv", "question,answer\nné?,1\n".encode() + b"n\xe9?,1\n", "m.csv:3: byte 0xe9 is not UTF-8"),
        ("m.jsonl", '{"question": "né?"}\n'.encode() + b'{"question": "n\xe9?"}', "m.jsonl:2: byte 0xe9 is not UTF-8"),
        ("m.csv.gz", b"question,answer\n", "m.csv.gz cannot be read: Not a gzipped file"),
        ("m.parquet", b"question,answer\na?,1\n", "m.parquet is not a readable Parquet file: "),
        ("m.csv", b"question,answer,hint,answer\na?,1,x,2\n", "m.csv:1: the header has 'answer' 2 times; rename"),
        ("m.csv", "\ufeffquestion, answer,answer \na?,1,2\n".encode(), "m.csv:1: the header has 'answer' 2 times"),
        ("m.csv", b"question,answer,hint\na?,1\n", "m.csv:2: more or fewer cells than the 3 names"),
        ("m.jsonl", b'{"question": "a?", "answer": "1", "answer": "2"}', "m.jsonl:1: the key 'answer' occurs twice"),
        ("m.jsonl", b'\n{"question": "a?", "answer": "1", "x": [{"y": 1, "y": 1}]}', "m.jsonl:2: the key 'y' occurs"),
        (
            "m.jsonl",
            b'{"question": "a?", "answer": "1"}\n{"question": "b?" "answer": "2"}',
            "(column 19: Expecting ',' delim",
        ),
        ("m.jsonl", b'[\n{"question": "a?", "answer": "1"}\n]', "m.jsonl:1: not JSON"),
        ("m.jsonl", b'[{"question": "a?", "answer": "1"}]', "m.jsonl:1: got list; expected an object"),
        ("m.jsonl", b"question: a?", "m.jsonl:1: not JSON"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        GSM8K.load("train", str(tmp_path / name))
    assert message in str(error.value) and "\n" not in str(error.value)


READS_ROWS = """
from lora_grpo.tasks import read_rows

def load(split, source):
    return read_rows(source, split)

def check(completion, row):
    return completion == row["answer"]
"""


def test_a_task_file_reads_the_same_formats_with_the_same_messages(tmp_path):
    (tmp_path / "own.py").write_text(READS_ROWS)
    task = get_task(str(tmp_path / "own.py"))
    for name in FORMATS:
        rows = task.load("train", write(tmp_path / name, ROWS))
        assert [(row["question"], row["answer"]) for row in rows] == [(row["question"], row["answer"]) for row in ROWS]
    (tmp_path / "m.csv").write_text("question,answer\na,b,c\n")
    with pytest.raises(UserError) as error:
        task.load("train", str(tmp_path / "m.csv"))
    assert str(error.value).startswith(f"{tmp_path / 'm.csv'}:2: more or fewer cells")


READS_THE_FILE_BESIDE_IT = """
from pathlib import Path

from lora_grpo.tasks import read_rows

def load(split):
    return read_rows(Path(__file__).with_name("mine.jsonl"), split)

def check(completion, row):
    return completion == row["answer"]
"""


def test_a_task_file_reads_the_file_beside_it(tmp_path):
    write(tmp_path / "mine.jsonl", ROWS)
    (tmp_path / "own.py").write_text(READS_THE_FILE_BESIDE_IT)
    rows = get_task(str(tmp_path / "own.py")).load("train")
    assert [(row["question"], row["answer"]) for row in rows] == [(row["question"], row["answer"]) for row in ROWS]


def test_columns_of_a_task_file_are_renamed_in_the_file(tmp_path):
    (tmp_path / "own.py").write_text(READS_ROWS)
    data = DataConfig(str(tmp_path / "own.py"), "mine.jsonl", "mine.jsonl", columns=("question=problem",))
    with pytest.raises(UserError, match=r"load in own\.py makes its columns, so rename them there$"):
        columns_of(data, "train")


def test_a_task_file_that_reads_rows_asks_for_a_file(tmp_path):
    (tmp_path / "own.py").write_text(READS_ROWS)
    task = get_task(str(tmp_path / "own.py"))
    with pytest.raises(UserError, match=r"^no train rows are given; pass .* with --data\.train$"):
        task.load("train")
    with pytest.raises(UserError, match=r"^no eval rows .* with --data\.eval \(not for a task of --eval\.also\)$"):
        task.load("eval")


@pytest.fixture
def hub_dataset(tmp_path, monkeypatch):
    """The dataset own/sums with two configurations and two splits.

    A folder stands in for a repository: `datasets` reads both by the same configuration.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "own" / "sums"
    configs = []
    for config in ("easy", "hard"):
        (folder / config).mkdir(parents=True)
        files = []
        for split in ("train", "validation"):
            row = {"question": f"{config} {split}?", "answer": "1"}
            (folder / config / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
            files.append({"split": split, "path": f"{config}/{split}.jsonl"})
        configs.append({"config_name": config, "data_files": files})
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")


@pytest.mark.parametrize(
    ("source", "split", "question"),
    [
        ("own/sums:hard", "train", "hard train?"),
        ("own/sums:hard@validation", "eval", "hard validation?"),
        ("own/sums:easy@train", "eval", "easy train?"),
    ],
)
def test_a_source_may_name_a_config_and_a_split_of_a_hub_dataset(hub_dataset, source, split, question):
    assert [row["question"] for row in GSM8K.load(split, source)] == [question]
    assert read_rows(source, split)[0]["question"] == question


@pytest.mark.parametrize(
    ("source", "existing"),
    [
        ("own/sums@train", "['easy', 'hard']"),
        ("own/sums:hrad", "['easy', 'hard']"),
        ("own/sums:hard", "['train', 'validation']"),
        ("own/sums:hard@test", "['train', 'validation']"),
    ],
)
def test_a_wrong_config_or_split_is_answered_with_those_that_exist(hub_dataset, source, existing):
    with pytest.raises(UserError) as error:
        GSM8K.load("eval", source)
    message = str(error.value)
    assert existing in message and "pass own/sums:CONFIG@SPLIT" in message
    assert "with --data.eval" in message and "--eval.also" in message
    assert "\n" not in message
