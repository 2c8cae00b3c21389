# /// script
# requires-python = ">=3.11"
# dependencies = ["lora-grpo"]
#
# [tool.uv.sources]
# lora-grpo = { path = "..", editable = true }
# ///
"""A model learns to answer questions about a database with tools, in conversations of several turns.

Method. The names of tables and columns differ in every row, so the model must look them up before it can write a query.
SFT on reference conversations teaches the calls. GRPO continues from that adapter and trains on whole conversations:
the reward is 1 if the answer is the result of the reference query, else 0. Queries can only read.

    python recipes/sft_lora.py --preset laptop --task recipes/sql_lora.py
    python recipes/sql_lora.py --preset laptop --lora.from outputs/sft_lora --seed 1   # in another order than SFT
"""

import random
import re
import sqlite3
from typing import NamedTuple

from lora_grpo.config import gpu_preset, laptop_preset
from lora_grpo.pipeline import run_recipe

SYSTEM_PROMPT = "Find the answer in the database. Reply with the answer alone."
MAX_TURNS = 6
TRAIN_SEEDS = range(600)
EVAL_SEEDS = range(600, 900)

# What the words of a row are drawn from
GROUPS = "team club school shop firm farm hotel library museum studio"
MEMBERS = "player singer pupil clerk driver guide baker painter nurse pilot"
VALUES = "points wage age score height weight bonus rank"
TITLES = "Amber Bravo Cedar Delta Ember Falcon Granite Harbor Indigo Juniper"
NAMES = "Anna Ben Carla David Elena Felix Grace Hugo Irene Jonas Karin Leo Maria Nils Olga Paul Rosa Simon"

# How tables and columns are called after them
TABLES = "{}s all_{}s {}_list"
NAME_COLUMNS = "name full_name"
GROUP_COLUMNS = "{} {}_title {}_name"
VALUE_COLUMNS = "{} num_{} {}_now"


class Question(NamedTuple):
    """A question, and its answer as a query: SELECT selected FROM the table of the members, condition."""

    text: str
    selected: str
    condition: str


QUESTIONS = (
    Question("How many {member}s have {value} above {limit}?", "COUNT(*)", "WHERE {value_column} > {limit}"),
    Question(
        "What is the total {value} of {member}s in the {group} {title}?",
        "SUM({value_column})",
        "WHERE {group_column} = '{title}'",
    ),
    Question(
        "What is the highest {value} of {member}s in the {group} {title}?",
        "MAX({value_column})",
        "WHERE {group_column} = '{title}'",
    ),
    Question("Which {member} has the lowest {value}?", "{name_column}", "ORDER BY {value_column} LIMIT 1"),
    Question("In which {group} is the {member} {name}?", "{group_column}", "WHERE {name_column} = '{name}'"),
)
ALLOWED_ACTIONS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


def load(split):
    """Return rows with a question, the script of its database, and the reference query."""
    seeds = TRAIN_SEEDS if split == "train" else EVAL_SEEDS
    return [make_row(random.Random(seed)) for seed in seeds]


def make_row(generator):
    """Return a row about members of groups, such as the players of clubs. Two other tables are distractors."""

    def draw(words):
        [word] = generator.sample(words.split(), 1)
        return word

    # The words, and the names of the tables and columns
    member, *other_members = generator.sample(MEMBERS.split(), 3)
    group = draw(GROUPS)
    value = draw(VALUES)
    table = draw(TABLES).format(member)
    other_tables = [draw(TABLES).format(other) for other in other_members]
    name_column = draw(NAME_COLUMNS)
    group_column = draw(GROUP_COLUMNS).format(group)
    value_column = draw(VALUE_COLUMNS).format(value)

    # Eight members, each with a number and one of three groups
    titles = generator.sample(TITLES.split(), 3)
    limit, *numbers = generator.sample(range(10, 100), 9)
    names = generator.sample(NAMES.split(), 8)
    members = list(zip(names, numbers, generator.sample(titles * 3, 8), strict=True))

    # A question about the group of the first member, or about the second member
    question = generator.choice(QUESTIONS)
    words = {
        "member": member,
        "group": group,
        "value": value,
        "title": members[0][2],
        "name": members[1][0],
        "limit": limit,
        "name_column": name_column,
        "group_column": group_column,
        "value_column": value_column,
    }
    selected = question.selected.format(**words)
    condition = question.condition.format(**words)

    # The distractors have the third and the fourth member, never the one of the question
    script = [create_table(table, [name_column, value_column, group_column], members)]
    for other_table, (name, _, title) in zip(other_tables, members[2:4], strict=True):
        script.append(create_table(other_table, [name_column, group_column], [(name, title)]))
    return {
        "question": question.text.format(**words),
        "database": "\n".join(script),
        "query": f"SELECT {selected} FROM {table} {condition}",
    }


def create_table(name, columns, rows):
    """Return the SQL that makes a table."""
    table = f"{name} ({', '.join(columns)})"
    values = ", ".join(str(row) for row in rows)  # tuples of Python are written as in SQL
    return f"CREATE TABLE {table}; INSERT INTO {table} VALUES {values};"


def only_read(action, *_):
    """Return whether SQLite may take an action in a query."""
    return sqlite3.SQLITE_OK if action in ALLOWED_ACTIONS else sqlite3.SQLITE_DENY


class Environment:
    """A database in memory that the model can only read."""

    def reset(self, database, query, **row):
        self._answer = None
        self._database = sqlite3.connect(":memory:")
        self._database.executescript(database)
        self._database.set_authorizer(only_read)
        self._database.set_progress_handler(lambda: True, 100_000)  # stops a query after as many instructions
        self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)  # bytes of a value
        self._expected = self.query(query)

    def tables(self):
        """List the tables."""
        return self.query("SELECT group_concat(name, ', ') FROM (SELECT name FROM sqlite_master ORDER BY name)")

    def describe(self, table: str):
        """Show the columns of a table.

        Args:
            table: name
        """
        definition = self._database.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        if definition is None:
            return f"no table {table}"
        return definition[0].removeprefix("CREATE TABLE ")

    def query(self, sql: str):
        """Run a SELECT.

        Args:
            sql: query
        """
        rows = self._database.execute(sql).fetchmany(5)
        lines = [", ".join(str(value) for value in row) for row in rows]
        return "\n".join(lines)[:200] or "no rows"

    def reply(self, text):
        self._answer = text.strip()  # and the conversation ends

    def get_reward(self):
        return float(self._answer == self._expected)


def gold(row):
    """Return a conversation that looks up the names, runs the reference query and reports its result."""
    environment = Environment()
    environment.reset(**row)
    table = re.search(r"FROM (\w+)", row["query"])[1]
    return [
        calling("tables"),
        calling("describe", table=table),
        calling("query", sql=row["query"]),
        {"role": "assistant", "content": environment._expected},
    ]


def teacher_prompt(row):
    """Return the question with the reference query, for a teacher that reads more than the model (`--teacher self`)."""
    return f"{row['question']}\nThe query of the answer is: {row['query']}"


def calling(name, **arguments):
    """Return a message that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def gpu(model: str) -> dict:
    return gpu_preset(
        model,
        model={"max_sequence_tokens": 2048},
        data={"task": __file__, "eval_limit": 200},
        sampling={"max_completion_tokens": 1024, "max_turn_tokens": 256},
        train={"max_steps": 100},
    )


PRESETS = {
    "laptop": laptop_preset(
        model={"chat_template": "qwen2_5", "max_sequence_tokens": 768},
        data={"task": __file__, "eval_limit": 200},
        sampling={"max_completion_tokens": 304, "max_turn_tokens": 96, "temperature": 0.9},
        train={
            "max_steps": 12,
            "prompts_per_step": 6,
            "micro_batch_size": 4,
            "learning_rate": 2e-4,
            "warmup_steps": 4,
            "lr_scheduler": "constant_with_warmup",
        },
        eval={"num_samples": 1, "temperature": 0.9},
    ),
    "8gb": gpu("Qwen/Qwen2.5-0.5B-Instruct"),
    "12gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "16gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "24gb": gpu("Qwen/Qwen2.5-3B-Instruct"),
}

SFT_PRESETS = {
    "laptop": {
        "data": {"eval_limit": 100},
        "train": {
            "max_steps": 32,
            "prompts_per_step": 4,
            "learning_rate": 5e-4,
            "lr_scheduler": "constant",
            "warmup_steps": 0,
        },
    }
}

if __name__ == "__main__":
    run_recipe("sql_lora", __doc__, PRESETS)
