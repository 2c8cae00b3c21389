"""Questions about a table, and the table in SQLite. The task, the agent and the SFT import this file."""

import random
import sqlite3

INSTRUCTIONS = "Find the answer in the table {table}. Reply with the answer alone."

# What the words of a row are drawn from. Columns have the names of groups and values.
GROUPS = "team club school shop firm farm hotel library museum studio"
MEMBERS = "player singer pupil clerk driver guide baker painter nurse pilot"
VALUES = "points wage age score height weight bonus rank"
TITLES = "Amber Bravo Cedar Delta Ember Falcon Granite Harbor Indigo Juniper"
NAMES = "Anna Ben Carla David Elena Felix Grace Hugo Irene Jonas Karin Leo Maria Nils Olga Paul Rosa Simon"

# Questions, and their answers as queries
QUESTIONS = (
    ("How many {member}s have {value} above {limit}?", "SELECT COUNT(*) FROM {table} WHERE {value} > {limit}"),
    (
        "What is the total {value} of {member}s in the {group} {title}?",
        "SELECT SUM({value}) FROM {table} WHERE {group} = '{title}'",
    ),
    (
        "What is the highest {value} of {member}s in the {group} {title}?",
        "SELECT MAX({value}) FROM {table} WHERE {group} = '{title}'",
    ),
    ("Which {member} has the lowest {value}?", "SELECT name FROM {table} ORDER BY {value} LIMIT 1"),
    ("In which {group} is the {member} {name}?", "SELECT {group} FROM {table} WHERE name = '{name}'"),
)
ALLOWED_ACTIONS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


def load(split):
    """Return rows with a question, the script of its database, and the answer."""
    seeds = range(600) if split == "train" else range(600, 900)
    return [make_row(seed) for seed in seeds]


def make_row(seed):
    """Return a row about members of groups, such as the players of clubs, who have two values."""
    generator = random.Random(seed)
    member = generator.choice(MEMBERS.split())
    group = generator.choice(GROUPS.split())
    value, other_value = generator.sample(VALUES.split(), 2)
    table = generator.choice([f"{member}s", f"all_{member}s", f"{member}_list"])

    # Eight members, each with two numbers and one of three groups
    titles = generator.sample(TITLES.split(), 3)
    limit, *numbers = generator.sample(range(10, 100), 17)
    values_by_column = {
        "name": generator.sample(NAMES.split(), 8),
        group: generator.sample(titles * 3, 8),
        value: numbers[:8],
        other_value: numbers[8:],
    }
    columns = generator.sample(list(values_by_column), 4)
    members = zip(*(values_by_column[column] for column in columns), strict=True)
    definition = f"{table} ({', '.join(columns)})"
    values = ", ".join(str(values) for values in members)  # tuples of Python are written as in SQL
    script = f"CREATE TABLE {definition}; INSERT INTO {table} VALUES {values};"

    # A question about the group of the first member, or about the second member
    question, query = generator.choice(QUESTIONS)
    words = {
        "member": member,
        "group": group,
        "value": value,
        "limit": limit,
        "title": values_by_column[group][0],
        "name": values_by_column["name"][1],
        "table": table,
    }
    query = query.format(**words)
    return {
        "question": question.format(**words),
        "table": definition,
        "script": script,
        "query": query,
        "answer": run_query(open_database(script), query),
    }


def open_database(script):
    """Return a database in memory that can only be read."""
    database = sqlite3.connect(":memory:")
    database.executescript(script)
    database.set_authorizer(only_read)
    database.set_progress_handler(lambda: True, 100_000)  # stops a query after as many instructions
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)  # bytes of a value
    return database


def only_read(action, *_):
    """Return whether SQLite may take an action in a query."""
    return sqlite3.SQLITE_OK if action in ALLOWED_ACTIONS else sqlite3.SQLITE_DENY


def run_query(database, sql):
    """Return the result of a query as text, or raise sqlite3.Error."""
    rows = database.execute(sql).fetchmany(5)
    lines = [", ".join(str(value) for value in row) for row in rows]
    return "\n".join(lines)[:100] or "no rows"
