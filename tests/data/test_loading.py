"""Training and evaluation rows: no problem is in both, none is repeated, and each has its prompt."""

import dataclasses
import json

import pytest

from lora_grpo import sandbox
from lora_grpo.config.schema import DataConfig, RunConfig, TrainConfig
from lora_grpo.data import load_data, load_evaluation_rows, start_sandbox
from lora_grpo.errors import UserError
from lora_grpo.sandbox import Settings


def row(question, answer="#### 5"):
    return {"question": question, "answer": answer}


@pytest.fixture
def configure(tmp_path):
    """Return a function that writes both splits and returns a configuration with two prompts per step."""

    def write(train, validation, **data):
        for name, rows in (("train", train), ("eval", validation)):
            text = "".join(json.dumps(entry) + "\n" for entry in rows)
            (tmp_path / f"{name}.jsonl").write_text(text)
        return RunConfig(
            data=DataConfig("gsm8k", str(tmp_path / "train.jsonl"), str(tmp_path / "eval.jsonl"), **data),
            train=TrainConfig(prompts_per_step=2),
        )

    return write


def questions(rows):
    return [entry["question"] for entry in rows]


def test_rows_get_prompts(configure):
    data = load_data(configure([row("a"), row("b")], [row("c")], prompt_style="hashes"))
    assert questions(data.train) == ["a", "b"]
    assert questions(data.eval) == ["c"]
    first = data.train[0]
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert first["prompt"][-1]["content"] == "a"
    assert (first["prompt_style"], first["task"], first["answer"]) == ("hashes", "gsm8k", "#### 5")


def test_an_evaluation_question_is_not_trained_on(configure, capsys):
    data = load_data(configure([row("a"), row("b"), row("c"), row("d ")], [row("a"), row("d")]))
    assert questions(data.train) == ["b", "c"]
    assert questions(data.eval) == ["a", "d"]
    assert capsys.readouterr().err == "dropped 2 training rows whose questions are in the evaluation set\n"


def test_no_question_of_the_evaluation_set_is_trained_on_if_only_some_are_evaluated(configure, capsys):
    rows = [row(name) for name in "abcdef"]
    data = load_data(configure(rows, [row(name) for name in "abcdx"], eval_limit=1))
    assert questions(data.train) == ["e", "f"]
    assert len(data.eval) == 1
    assert "dropped 4 training rows" in capsys.readouterr().err


def test_an_evaluation_set_with_all_training_questions_is_refused(configure):
    rows = [row("a"), row("b"), row("c"), row("d")]
    for evaluation, limit in ((rows, None), (rows, 1), ([*rows, row("e")], 2)):
        with pytest.raises(UserError, match=f"all 4 training questions are .* evaluation set .{len(evaluation)} rows"):
            load_data(configure(rows, evaluation, eval_limit=limit))


def test_a_row_that_repeats_another_is_dropped_from_either_split(configure, capsys):
    train = [row("a"), row("b"), row("a", "so it is\n#### 6"), row("a ")]
    data = load_data(configure(train, [row("c"), row("c", "5")]))
    assert [entry["id"] for entry in data.train] == ["train/0", "train/1"]
    assert [entry["id"] for entry in data.eval] == ["eval/0"]
    assert capsys.readouterr().err == (
        "dropped 2 of 4 train rows that repeat another row\ndropped 1 of 2 eval rows that repeat another row\n"
    )


@pytest.fixture
def task_file(tmp_path):
    """Return a function that writes a task with these training rows and loads it."""

    def load(*rows):
        text = f"def load(split):\n    return {rows!r} if split == 'train' else [{{'question': 'held out'}}]\n"
        path = tmp_path / "own.py"
        path.write_text(text + "def check(completion, row):\n    return True\n")
        return load_data(RunConfig(data=DataConfig(str(path)), train=TrainConfig(prompts_per_step=1))).train

    return load


def test_rows_of_a_task_file_repeat_another_if_all_their_columns_do(task_file, capsys):
    spell = {"question": "Spell it.", "word": "stone"}
    assert len(task_file(spell, {**spell, "word": "river"}, {**spell, "word": "river"})) == 2
    assert "dropped 1 of 3 train rows" in capsys.readouterr().err


OWN_ROWS = """
from lora_grpo.tasks import read_rows

def load(split, source=None):
    return read_rows(source, split) if source else [{"question": f"{split} {n}"} for n in range(4)]

def check(completion, row):
    return True
"""


@pytest.mark.parametrize(("given", "other"), [("train", "eval"), ("eval", "train")])
def test_a_task_file_that_gets_one_of_two_sources_says_so(configure, tmp_path, capsys, given, other):
    """The rows of an example in the file would else be evaluated in place of the user's."""
    config = configure([row("a"), row("b")], [row("c")])
    (tmp_path / "own.py").write_text(OWN_ROWS)
    data = dataclasses.replace(config.data, task=str(tmp_path / "own.py"))
    load_data(dataclasses.replace(config, data=data))
    assert capsys.readouterr().err == ""
    loaded = load_data(dataclasses.replace(config, data=dataclasses.replace(data, **{other: None})))
    assert questions(getattr(loaded, other))[0] == f"{other} 0"
    note = f"--data.{given} is given and --data.{other} is not: load in own.py makes the other rows itself\n"
    assert capsys.readouterr().err == note


def test_few_shot_examples_are_shown_and_not_trained_on(configure):
    data = load_data(configure([row("a", "2+3\n#### 5"), row("b"), row("c")], [row("d")], few_shot=1))
    assert questions(data.train) == ["b", "c"]
    for entry in (*data.train, *data.eval):
        shown = [message["content"] for message in entry["prompt"] if message["role"] == "user"]
        assert shown == ["a", entry["question"]]
        solved = [message["content"] for message in entry["prompt"] if message["role"] == "assistant"]
        assert "2+3" in solved[0] and "<answer>" in solved[0]


def test_fewer_rows_than_worked_examples_are_refused(configure):
    config = configure([row("a"), row("b"), row("c"), row("d")], [row("d")], few_shot=4)
    with pytest.raises(UserError, match=r"few-shot is 4 and 3 training rows .* --data\.train") as error:
        load_data(config)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="few-shot is 4"):
        load_evaluation_rows(config.data, seed=0, train_seed=0)


@pytest.mark.parametrize(
    ("train", "validation", "changed"),
    [
        ([row("a"), row("b"), row("c", "#### 6")], [row("d")], "train"),
        ([row("b"), row("a"), row("c")], [row("d")], "train"),
        ([row("a"), row("b"), row("c")], [row("d", "#### 6")], "eval"),
    ],
)
def test_the_fingerprint_is_the_contents(configure, train, validation, changed):
    before = load_data(configure([row("a"), row("b"), row("c")], [row("d")])).record
    after = load_data(configure(train, validation)).record
    assert before[changed]["sha256"] != after[changed]["sha256"]
    unchanged = "eval" if changed == "train" else "train"
    assert before[unchanged]["sha256"] == after[unchanged]["sha256"]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_row_that_is_not_unicode_is_named(configure, split):
    rows = {"train": [row("a"), row("b")], "eval": [row("c")]}
    rows[split].append(row("half \ud83d"))
    with pytest.raises(UserError, match=rf"row {split}/{len(rows[split]) - 1}: '\\ud83d' is not"):
        load_data(configure(*rows.values()))


def test_a_limit_samples_with_the_seed(configure):
    rows = [row(name) for name in "abcdefgh"]
    config = configure(rows, [row("z")], train_limit=4)
    first = questions(load_data(config).train)
    assert len(first) == 4
    draws = [questions(load_data(dataclasses.replace(config, seed=seed)).train) for seed in range(8)]
    assert draws[0] == first
    assert len(set(map(tuple, draws))) > 1


@pytest.fixture
def humaneval(tmp_path):
    """Return a function that configures training and evaluation on six problems in HumanEval's format."""
    rows = [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f'def add_{i}(x):\n    """Return x + {i}."""\n',
            "entry_point": f"add_{i}",
            "canonical_solution": f"    return x + {i}\n",
            "test": f"def check(candidate):\n    assert candidate(1) == {1 + i}\n",
        }
        for i in range(6)
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))

    def config(task="humaneval", **data):
        source = {"train": str(path), "eval": str(path)} if task == "humaneval" else {"eval": str(path)}
        return RunConfig(
            data=DataConfig(task, **source, **data), train=TrainConfig(prompts_per_step=2), sandbox=Settings(workers=1)
        )

    yield config
    sandbox.stop()


def test_a_benchmark_is_not_trained_on(humaneval):
    with pytest.raises(UserError, match="all 6 training questions are also in the evaluation set"):
        load_data(humaneval(train_limit=2, prompt_style="code"))


def test_the_isolation_of_programs_is_printed_and_recorded(humaneval, configure, capsys):
    config = humaneval("starter-code", eval_task="humaneval", train_limit=4, prompt_style="code")
    start_sandbox(config.data, config.sandbox)
    started = capsys.readouterr().err
    data = load_data(config)
    assert {row["task"] for row in data.train} == {"starter-code"} and len(data.eval) == 6
    line = data.record["sandbox"]
    assert "seccomp" in line and "1 workers" in line and f"sandbox: {line}\n" in started
    assert load_data(configure([row("a"), row("b")], [row("c")])).record["sandbox"] is None


def test_a_problem_of_mbpp_plus_is_not_trained_on_as_one_of_mbpp(tmp_path, capsys):
    code = "def f{0}(x):\n    return x + {0}\n"
    train = [
        {"task_id": i, "text": f"Add {i}.", "code": code.format(i), "test_list": [f"assert f{i}(1) == {i + 1}"]}
        for i in (601, 602, 603, 604)
    ]
    evaluation = [
        {
            "task_id": f"Mbpp/{i}",
            "prompt": f'"""\nAdd {i} to a number.\nassert f{i}(2) == {i + 2}\n"""\n',
            "entry_point": f"f{i}",
            "canonical_solution": code.format(i),
            "base_input": [[1]],
            "plus_input": [[2]],
            "atol": 0,
        }
        for i in (602, 11)
    ]
    paths = [tmp_path / "mbpp.jsonl", tmp_path / "MbppPlus.jsonl"]
    for path, rows in zip(paths, (train, evaluation), strict=True):
        path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    data = DataConfig("mbpp", *map(str, paths), eval_task="mbpp-plus", prompt_style="code")
    loaded = load_data(RunConfig(data=data, train=TrainConfig(prompts_per_step=2), sandbox=Settings(workers=1)))
    sandbox.stop()
    assert [row["id"] for row in loaded.train] == ["mbpp/601", "mbpp/603", "mbpp/604"]
    assert [row["id"] for row in loaded.eval] == ["mbpp/602", "mbpp/11"]
    assert "dropped 1 training rows" in capsys.readouterr().err
