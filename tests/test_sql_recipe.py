"""recipes/sql_lora.py: the tools of its environment, and its reference conversations."""

import contextlib
import re
import sqlite3
import time
from pathlib import Path

import pytest

from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.data import fit_data, gold_episodes, load_data
from lora_grpo.errors import UserError
from lora_grpo.models import base_model, prepare_tokenizer
from lora_grpo.prompts import chat
from lora_grpo.tasks import get_task

RECIPE = str(Path(__file__).resolve().parents[1] / "recipes" / "sql_lora.py")
CONFIG = replace(RunConfig(), {"data": {"task": RECIPE}, "model": {"chat_template": "qwen2_5"}})


@pytest.fixture(scope="module")
def data():
    return load_data(CONFIG)


@pytest.fixture(scope="module")
def module():
    return get_task(RECIPE).module


@pytest.fixture
def row(data):
    return data.train[0]["loaded_row"]


@pytest.fixture
def environment(module, row):
    environment = module.Environment()
    environment.reset(**row)
    return environment


def test_the_tools_show_the_database(environment, row):
    names = environment.tables().split(", ")
    assert names == sorted(re.findall(r"CREATE TABLE (\w+)", row["database"])) and len(names) == 3
    for name in names:
        table, columns = re.fullmatch(r"(\w+) \((.*)\)", environment.describe(name)).groups()
        assert table == name and len(environment.query(f"SELECT {columns} FROM {name}").splitlines()) in (1, 5)
    assert environment.describe("x'; --") == "no table x'; --"
    assert environment.query("SELECT 1 WHERE 0") == "no rows"
    assert len(environment.query("SELECT sql, sql, sql, sql FROM sqlite_master")) == 200


WRITES = [
    *(
        "DROP TABLE {}",
        "DELETE FROM {}",
        "UPDATE {} SET rowid = 1",
        "INSERT INTO {} DEFAULT VALUES",
        "ALTER TABLE {} RENAME TO x",
    ),
    *(
        "CREATE TABLE x (y)",
        "ATTACH 'x.db' AS x",
        "VACUUM",
        "PRAGMA query_only = 0",
        "BEGIN",
        "SELECT load_extension('x')",
    ),
    *("SELECT 1; DROP TABLE {}", "EXPLAIN SELECT 1; SELECT 2", "SELECT hex(zeroblob(1000000))"),
]


@pytest.mark.parametrize("sql", WRITES)
def test_a_query_can_only_read(environment, tmp_path, monkeypatch, sql):
    monkeypatch.chdir(tmp_path)
    table = environment.tables().split(", ")[0]
    before = environment.query(f"SELECT * FROM {table}")
    with pytest.raises(sqlite3.Error):
        environment.query(sql.format(table))
    assert environment.query(f"SELECT * FROM {table}") == before and not [*tmp_path.iterdir()]


def test_an_endless_query_is_stopped(environment, row):
    started = time.monotonic()
    many = ", ".join(f"{environment.tables().split(', ')[0]} AS t{number}" for number in range(60))
    for sql in (
        f"SELECT count(*) FROM {many}",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n",
    ):
        with pytest.raises(sqlite3.Error, match=r"interrupted|not authorized"):
            environment.query(sql)
    assert time.monotonic() - started < 2
    assert environment.query(row["query"]) == environment._expected


def test_an_answer_is_the_result_and_not_in_the_question(data, module):
    for row in (*data.train, *data.eval):
        given, answers = row["loaded_row"], {}
        for name in ("right", "wrong", "none"):
            environment = module.Environment()
            environment.reset(**given)
            right = environment.query(given["query"])
            if name != "none":
                assert environment.reply(f" {right}\n" if name == "right" else f"It is {right}") is None
            answers[name] = environment.get_reward()
        assert answers == {"right": 1.0, "wrong": 0.0, "none": 0.0}
        assert right not in ("no rows", "None") and "\n" not in right
        assert not re.search(rf"\b{right}\b", given["question"])
        table, *others = re.findall(r"CREATE TABLE (\w+)", given["database"])
        for other in others:
            with contextlib.suppress(sqlite3.OperationalError):  # most queries need a column that it does not have
                assert environment.query(given["query"].replace(f"FROM {table} ", f"FROM {other} ")) != right


def test_reference_conversations_pass_and_have_the_tokens_of_the_rendered_conversation(data):
    tokenizer = base_model.load_tokenizer(ModelConfig())
    prepare_tokenizer(tokenizer, CONFIG, None)
    rows = [*data.train, *data.eval]
    for row, episode in zip(rows, gold_episodes(tokenizer, rows), strict=True):
        assert episode.verdict.passed and episode.turns == 4 and episode.ended_by == "reply"
        assert episode.session.calls == 3 and not episode.session.failed_calls
        rendered = chat.render(tokenizer, [*row["prompt"], *episode.messages], row["tools"])
        whole = tokenizer.decode(episode.prompt_ids + episode.token_ids)
        assert rendered == f"{whole}\n<|im_start|>assistant\n"
        own = tokenizer.decode(episode.sampled_ids)
        assert row["query"] in own and "tool_response" not in own and "CREATE" not in own


def test_a_template_without_tools_is_refused_before_weights_are_loaded(data):
    with pytest.raises(UserError, match=r"--model\.chat-template qwen2_5") as refusal:
        fit_data(data, base_model.load_tokenizer(ModelConfig()), CONFIG)
    assert "\n" not in str(refusal.value)


def prepared_for(**model):
    tokenizer = base_model.load_tokenizer(ModelConfig())
    prepare_tokenizer(tokenizer, replace(CONFIG, {"model": model}), None, quiet=True)
    return tokenizer


def test_a_template_that_changes_a_call_is_refused(data):
    """It quotes a text with quotes in it."""
    rows = [row for row in data.train if "'" in row["query"]][:4]
    with pytest.raises(UserError, match=r"pass another --model\.chat-template$"):
        gold_episodes(prepared_for(chat_template="lfm2_2_5"), rows)


@pytest.mark.parametrize("thinks", ["true", "false"])
def test_a_template_that_opens_a_thought_has_its_calls_after_it(data, thinks):
    tokenizer = prepared_for(chat_template="qwen3_5_think", chat_template_kwargs=(f"enable_thinking={thinks}",))
    rows = [row for row in data.train if "'" in row["query"]][:4]
    for episode in gold_episodes(tokenizer, rows):
        assert episode.verdict.passed and not episode.session.failed_calls
        whole = tokenizer.decode(episode.prompt_ids + episode.token_ids)
        assert whole.count("<think>") == whole.count("</think>") == episode.turns
