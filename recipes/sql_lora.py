"""A model learns to answer questions about a database with tools, in conversations of several turns.

Method. The names of tables and columns differ in every row, so the model must look them up before it can write a query.
SFT on reference conversations teaches the calls. GRPO continues from that adapter and trains on whole conversations:
the reward is 1 if the answer is the result of the reference query, else 0. Queries can only read.

    python recipes/sft_lora.py --preset laptop --task recipes/sql_lora.py \\
        --train.prompts-per-step 4 --train.max-steps 32 --train.learning-rate 5e-4
    python recipes/sql_lora.py --preset laptop --lora.from outputs/sft_lora --seed 1   # in another order than SFT
"""

import random
import re
import sqlite3

from lora_grpo.config import gpu_preset, laptop_preset
from lora_grpo.pipeline import run_recipe

SYSTEM_PROMPT = "Find the answer in the database. Reply with the answer alone."
MAX_TURNS = 6
GROUPS = "team club school shop firm farm hotel library museum studio"
MEMBERS = "player singer pupil clerk driver guide baker painter nurse pilot"
VALUES = "points wage age score height weight bonus rank"
TITLES = "Amber Bravo Cedar Delta Ember Falcon Granite Harbor Indigo Juniper"
NAMES = "Anna Ben Carla David Elena Felix Grace Hugo Irene Jonas Karin Leo Maria Nils Olga Paul Rosa Simon"
QUESTIONS = (
    ("How many {member}s have {value} above {limit}?", "COUNT(*)", "WHERE {number} > {limit}"),
    ("What is the total {value} of {member}s in the {group} {title}?", "SUM({number})", "WHERE {label} = '{title}'"),
    ("What is the highest {value} of {member}s in the {group} {title}?", "MAX({number})", "WHERE {label} = '{title}'"),
    ("Which {member} has the lowest {value}?", "{who}", "ORDER BY {number} LIMIT 1"),
    ("In which {group} is the {member} {name}?", "{label}", "WHERE {who} = '{name}'"),
)
READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


def load(split):
    """Return rows with a question, the script of its database, and the reference query."""
    return [make_row(random.Random(seed)) for seed in (range(600) if split == "train" else range(600, 900))]


def make_row(generator):
    """Return a row about people in groups, such as the players of clubs. Two other tables are distractors."""

    def some(words, number):
        return generator.sample(words.split(), number)

    (member, *others), [group], [value] = some(MEMBERS, 3), some(GROUPS, 1), some(VALUES, 1)
    table, *tables = (some("{}s all_{}s {}_list", 1)[0].format(each, each, each) for each in (member, *others))
    [who], [label] = some("name full_name", 1), some("{} {}_title {}_name", 1)
    label, number = label.format(group), some("{} num_{} {}_now", 1)[0].format(value)
    titles, numbers = some(TITLES, 3), generator.sample(range(10, 100), 9)
    members = [*zip(some(NAMES, 8), numbers[1:], generator.sample(titles * 3, 8), strict=True)]
    words = {"member": member, "group": group, "value": value, "title": members[0][2], "name": members[1][0]}
    words |= {"who": who, "number": number, "label": label, "limit": numbers[0]}
    question, selected, condition = (text.format(**words) for text in generator.choice(QUESTIONS))
    created = {f"{table} ({who}, {number}, {label})": members}
    for other, (name, _, title) in zip(tables, members[2:4], strict=True):  # never the member of the question
        created[f"{other} ({who}, {label})"] = [(name, title)]
    script = [f"CREATE TABLE {each}; INSERT INTO {each} VALUES {str(rows)[1:-1]};" for each, rows in created.items()]
    return {"question": question, "database": "\n".join(script), "query": f"SELECT {selected} FROM {table} {condition}"}


class Environment:
    """A database in memory that the model can only read."""

    def reset(self, database, query, **row):
        self._database, self._answer = sqlite3.connect(":memory:"), None
        self._database.executescript(database)
        self._database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
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
        found = self._database.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        return found[0].removeprefix("CREATE TABLE ") if found else f"no table {table}"

    def query(self, sql: str):
        """Run a SELECT.

        Args:
            sql: query
        """
        rows = self._database.execute(sql).fetchmany(5)
        return "\n".join(", ".join(map(str, row)) for row in rows)[:200] or "no rows"

    def reply(self, text):
        self._answer = text.strip()  # and the conversation ends

    def get_reward(self):
        return float(self._answer == self._expected)


def gold(row):
    """Return a conversation that looks up the names, runs the reference query and reports its result."""
    environment = Environment()
    environment.reset(**row)
    table = re.search(r"FROM (\w+)", row["query"])[1]
    messages = []
    for name, given in (("tables", {}), ("describe", {"table": table}), ("query", {"sql": row["query"]})):
        call = {"type": "function", "function": {"name": name, "arguments": given}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    return [*messages, {"role": "assistant", "content": environment._expected}]


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

if __name__ == "__main__":
    run_recipe("sql_lora", __doc__, PRESETS)
