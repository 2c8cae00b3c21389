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
    tables = environment.tables().split(", ")
    assert tables == sorted(re.findall(r"CREATE TABLE (\w+)", row["database"]))
    assert len(tables) == 3
    for table in tables:
        described_table, columns = re.fullmatch(r"(\w+) \((.*)\)", environment.describe(table)).groups()
        assert described_table == table
        assert len(environment.query(f"SELECT {columns} FROM {table}").splitlines()) in (1, 5)


def test_a_tool_that_finds_nothing_says_so_and_long_results_are_cut(environment):
    assert environment.describe("x'; --") == "no table x'; --"
    assert environment.query("SELECT 1 WHERE 0") == "no rows"
    assert len(environment.query("SELECT sql, sql, sql, sql FROM sqlite_master")) == 200


REFUSED_QUERIES = [
    # Changes of a table
    "DROP TABLE {table}",
    "DELETE FROM {table}",
    "UPDATE {table} SET rowid = 1",
    "INSERT INTO {table} DEFAULT VALUES",
    "ALTER TABLE {table} RENAME TO x",
    # Changes of the database or the connection
    "CREATE TABLE x (y)",
    "ATTACH 'x.db' AS x",
    "VACUUM",
    "PRAGMA query_only = 0",
    "BEGIN",
    "SELECT load_extension('x')",
    # Several statements, and much memory
    "SELECT 1; DROP TABLE {table}",
    "EXPLAIN SELECT 1; SELECT 2",
    "SELECT hex(zeroblob(1000000))",
]


@pytest.mark.parametrize("query", REFUSED_QUERIES)
def test_a_query_can_only_read(environment, tmp_path, monkeypatch, query):
    monkeypatch.chdir(tmp_path)
    table = environment.tables().split(", ")[0]
    rows_before = environment.query(f"SELECT * FROM {table}")
    with pytest.raises(sqlite3.Error):
        environment.query(query.format(table=table))
    assert environment.query(f"SELECT * FROM {table}") == rows_before
    assert not list(tmp_path.iterdir())


def test_an_endless_query_is_stopped(environment, row):
    table = environment.tables().split(", ")[0]
    product = ", ".join(f"{table} AS t{number}" for number in range(60))
    endless_queries = [
        f"SELECT count(*) FROM {product}",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n",
    ]
    started = time.process_time()
    for query in endless_queries:
        with pytest.raises(sqlite3.Error, match=r"interrupted|not authorized"):
            environment.query(query)
    assert time.process_time() - started < 2
    assert environment.query(row["query"]) == environment._expected


def begun(module, row):
    environment = module.Environment()
    environment.reset(**row)
    return environment


def test_an_answer_is_right_if_it_is_the_result(data, module):
    for row in (*data.train, *data.eval):
        columns = row["loaded_row"]
        right = begun(module, columns)
        result = right.query(columns["query"])
        assert right.reply(f" {result}\n") is None
        assert right.get_reward() == 1.0

        wrong = begun(module, columns)
        assert wrong.reply(f"It is {result}") is None
        assert wrong.get_reward() == 0.0

        assert begun(module, columns).get_reward() == 0.0, "without an answer"


def test_an_answer_is_not_in_the_question_and_not_the_same_of_another_table(data, module):
    for row in (*data.train, *data.eval):
        columns = row["loaded_row"]
        environment = begun(module, columns)
        result = environment.query(columns["query"])
        assert result not in ("no rows", "None") and "\n" not in result
        assert not re.search(rf"\b{result}\b", columns["question"])

        table, *other_tables = re.findall(r"CREATE TABLE (\w+)", columns["database"])
        assert f"FROM {table} " in columns["query"]
        for other_table in other_tables:
            query = columns["query"].replace(f"FROM {table} ", f"FROM {other_table} ")
            with contextlib.suppress(sqlite3.OperationalError):  # most queries need a column that it does not have
                assert environment.query(query) != result


def test_reference_conversations_pass_and_have_the_tokens_of_the_rendered_conversation(data):
    tokenizer = base_model.load_tokenizer(ModelConfig())
    prepare_tokenizer(tokenizer, CONFIG, None)
    rows = [*data.train, *data.eval]
    for row, episode in zip(rows, gold_episodes(tokenizer, rows), strict=True):
        assert episode.verdict.passed and episode.turns == 4 and episode.ended_by == "reply"
        assert episode.session.calls == 3 and not episode.session.failed_calls
        rendered = chat.render(tokenizer, [*row["prompt"], *episode.messages], row["tools"])
        conversation = tokenizer.decode(episode.prompt_ids + episode.token_ids)
        assert rendered == f"{conversation}\n<|im_start|>assistant\n"
        sampled = tokenizer.decode(episode.sampled_ids)
        assert row["query"] in sampled
        assert "tool_response" not in sampled and "CREATE" not in sampled


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
    assert len(rows) == 4
    for episode in gold_episodes(tokenizer, rows):
        assert episode.verdict.passed and not episode.session.failed_calls
        conversation = tokenizer.decode(episode.prompt_ids + episode.token_ids)
        assert conversation.count("<think>") == conversation.count("</think>") == episode.turns
