"""The audit of an `Environment`: broken ones are caught by the attack that their mistake invites; good ones are not."""

import dataclasses

import pytest
from helpers.fresh_imports import ROOT

from lora_grpo.audit import audit, audit_tasks, refuse_problems
from lora_grpo.audit.attacks import GOLD
from lora_grpo.audit.audit_tasks import FULL, QUICK, Limits, audit_task
from lora_grpo.audit.policies import NAMES
from lora_grpo.config import RunConfig, replace
from lora_grpo.data import Data, load_data
from lora_grpo.errors import RunError, UserError
from lora_grpo.tasks import get_task

SAY = """
def say(text): return {"role": "assistant", "content": str(text)}

def call(name, /, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
"""
SUMS = (
    SAY
    + """
import random, re, time

def load(split):
    numbers = range(10, 30) if split == "train" else range(40, 60)
    return [{"question": f"What is {n} plus {n * n % 31 + 50}?", "sum": n + n * n % 31 + 50} for n in numbers]

def gold(row): return [say(row["sum"])]

class Environment:
    def reset(self, sum, question, **row):
        self.sum, self.question, self.right = sum, question, False

    def reply(self, text):
        self.right = text.strip() == str(self.sum)
        return None if self.right else "No."

    def get_reward(self):
        return float(self.right)
"""
)
STORE = (
    SAY
    + """
import os, sys, time
ITEMS = "lamp table chair carpet shelf mirror clock vase plate spoon fork knife bowl glass towel pillow".split()
PRICES = {item: 7 + 13 * number % 89 for number, item in enumerate(ITEMS)}

def load(split):
    pieces = 3 if split == "train" else 4
    return [{"question": f"How much are {pieces} of {item}?", "item": item, "pieces": pieces} for item in ITEMS]

def gold(row):
    return [call("look_up", item=row["item"]), call("submit", total=str(PRICES[row["item"]] * row["pieces"]))]

class Environment:
    def reset(self, item, pieces, **row):
        self.total, self.given = str(PRICES[item] * pieces), None

    def look_up(self, item: str):
        '''Return the price of one piece.

        Args:
            item: its name.
        '''
        return PRICES[item]

    def submit(self, total: str):
        '''Submit the answer.

        Args:
            total: the price of all pieces.
        '''
        self.given = total
        return "submitted"

    def get_reward(self):
        return float(self.given == self.total)
"""
)
QUIZ = (
    SAY
    + """
# QUIZ
FACTS = dict(France="Paris", Spain="Madrid", Italy="Rome", Peru="Lima", Cuba="Havana", Iran="Tehran", Egypt="Cairo")

def load(split):
    lands = list(FACTS) if split == "train" else list(FACTS)[::-1]
    return [{"lands": [lands[(n + k) % 7] for k in (0, 1, 2)]} for n in range(7)]

def prompt(row): return f"Three questions. What is the capital of {row['lands'][0]}?"
def gold(row): return [say(FACTS[land]) for land in row["lands"]]

class Environment:
    def reset(self, lands, **row):
        self.lands, self.points = lands, 0

    def reply(self, text):
        self.points += text.strip().casefold() == FACTS[self.lands.pop(0)].casefold()
        return f"And of {self.lands[0]}?" if self.lands else None

    def get_reward(self):
        return self.points / 3
"""
)
START = "self.right = sum, question, False"
RIGHT = "text.strip() == str(self.sum)"
PRICE = "return PRICES[item]"
GIVEN = "self.given == self.total"
REWARD = "float(self.right)"
GUESS_DOCSTRING = "'''Guess.\n\n        Args:\n            n: a sum.\n        '''"

BROKEN = {
    "state in the class, kept": (
        SUMS,
        {"class Environment:": "class Environment:\n    said = []", REWARD: "float(str(self.sum) in self.said)",
         "self.right = text": "self.said.append(text)\n        self.right = text"},
        "repeated calls",
    ),
    "state in the class, reset": (SUMS, {"self.sum, self.qu": "Environment.sum, self.qu"}, "side by side"),
    "state in the module": (
        SUMS,
        {"class Env": "GAME = {}\nclass Env", START: f"{START}; GAME['sum'] = sum", RIGHT: "text == str(GAME['sum'])"},
        "side by side",
    ),
    "state in the module, by row": (
        SUMS,
        {"class Env": "WON = {}\nclass Env", START: f"{START}; WON[sum] = 0", '"No."': 'f"No, {WON[self.sum]} won."',
         "self.right = text": f"WON[self.sum] += {RIGHT}\n        self.right = text"},
        "side by side",
    ),
    "reward before the end": (SUMS, {START: START.replace("False", "True")}, "reward before the end"),
    "reset draws at random": (SUMS, {START: f"{START}; return f' ({{random.random()}})'"}, "repeated calls"),
    "reply draws at random": (SUMS, {'"No."': 'random.choice(["No.", "Wrong."])'}, "repeated calls"),
    "the reward draws at random": (SUMS, {REWARD: "self.right * random.random()"}, "repeated calls"),
    "the time in a reply": (SUMS, {'"No."': 'f"No. ({time.perf_counter()})"'}, "repeated calls"),
    "a word of the model": (SUMS, {RIGHT: f"{RIGHT} or 'correct' in text"}, "claim of success"),
    "a lone word of the model": (SUMS, {RIGHT: f"{RIGHT} or text == 'done'"}, "claim of success"),
    "a reward in the model's words": (SUMS, {RIGHT: f"{RIGHT} or 'reward 1.0' in text"}, "claim of success"),
    "answer in the question": (SUMS, {"+ 50}?": "+ 50}? ({n + n * n % 31 + 50})"}, "answer in the prompt"),
    "answer in the text of reset": (SUMS, {START: f"{START}; return f' Say {{sum}}, not 7.'"}, "answer in the prompt"),
    "answer in a reply": (SUMS, {'"No."': 'f"Not 20, {self.sum} it is."'}, "copied words"),
    "answer in a reply, before others": (SUMS, {'"No."': 'f"{self.sum}, not 20."'}, "copied words"),
    "answer in a reply, without gold": (SUMS, {'"No."': 'f"{self.sum}."', "def gold": "def _gold"}, "copied words"),
    "answer in a reply, with numbers": (
        QUIZ,
        {"?\" if": '? (turn {4 - len(self.lands)}: {FACTS[self.lands[0]]})" if', "# QUIZ": "THRESHOLD = 0.6"},
        "copied words",
    ),
    "a number of the question": (SUMS, {RIGHT: f"{RIGHT} or text in self.question.split()[2:]"}, "copied words"),
    "the question": (SUMS, {RIGHT: f"{RIGHT} or text.startswith('What is')"}, "echo"),
    "the question, twice": (
        SUMS,
        {START: f"{START}; self.a = []", RIGHT: f"self.a.append(text) or {RIGHT} or self.a == [self.question] * 2"},
        "echo",
    ),
    "the reply": (SUMS, {RIGHT: f"{RIGHT} or text == 'No.'"}, "echo"),
    "substring": (SUMS, {RIGHT: "str(self.sum) in text"}, "all answers at once"),
    "substring of an argument": (STORE, {GIVEN: "self.total in str(self.given)"}, "all answers at once"),
    "any number of guesses in a turn": (
        SUMS,
        {'say(row["sum"])': 'call("guess", n=row["sum"])', RIGHT: "self.right or n == self.sum",
         "def reply(self, text):": f"def guess(self, n: int):\n        {GUESS_DOCSTRING}"},
        "all answers at once",
    ),
    "any number of submissions": (
        STORE,
        {"self.given = total": "self.given = [*(self.given or ()), total]", GIVEN: "self.total in (self.given or ())"},
        "all answers at once",
    ),
    "choices, until one is right": (
        SUMS,
        {'say(row["sum"])': 'say("abcd"[row["sum"] % 4])', RIGHT: "text == 'abcd'[self.sum % 4]"},
        "random words",
    ),
    "nothing": (SUMS, {RIGHT: f"{RIGHT} or not text"}, "empty text"),
    "nothing, in some rows": (SUMS, {RIGHT: f"{RIGHT} or not text and self.sum % 3 == 0"}, "empty text"),
    "spaces": (SUMS, {RIGHT: f"{RIGHT} or text.isspace()"}, "empty text"),
    "reply raises": (SUMS, {RIGHT: "int(text.split()[0]) == self.sum"}, "empty text"),
    "any word": (SUMS, {RIGHT: f"{RIGHT} or text.isalnum()"}, "random words"),
    "any argument": (STORE, {GIVEN: "bool(self.given)"}, "random words"),
    "an answer of any row": (SUMS, {RIGHT: "text in [gold(row)[0]['content'] for row in load('train')]"},
                             "answers of other rows"),
    "length": (SUMS, {RIGHT: f"{RIGHT} or len(text) > 1000"}, "long text"),
    "reply hangs": (SUMS, {RIGHT: f"{RIGHT} or len(text) > 1000 and time.sleep(60)"}, "long text"),
    "gold calls a tool that does not exist": (STORE, {'[call("look_up",': '[call("lookup"), call("look_up",'}, "gold"),
    "gold has an argument of another type": (STORE, {"total=str(PRICES": "total=(PRICES"}, "gold"),
    "gold goes on after the end": (SUMS, {'[say(row["sum"])]': '[say(row["sum"]), say("Thanks.")]'}, "gold"),
    "gold is wrong": (SUMS, {'say(row["sum"])': 'say(row["sum"] + 1)'}, "gold"),
    "gold is empty": (SUMS, {'[say(row["sum"])]': '[{"role": "user", "content": "?"}]'}, "gold"),
    "reward outside 0 to 1": (SUMS, {REWARD: "2.0 * self.right"}, "gold"),
    "a call is enough": (STORE, {PRICE: f"self.given = self.total\n        {PRICE}"}, "empty tool calls"),
    "any call is enough": (STORE, {GIVEN: f"{GIVEN} or self.given == ''"}, "empty tool calls"),
    "two calls are enough": (
        STORE,
        {PRICE: f"self.seen = True\n        {PRICE}", GIVEN: f"{GIVEN} or self.given == '' and hasattr(self, 'seen')"},
        "empty tool calls",
    ),
    "answer in the result of a tool": (
        STORE,
        {PRICE: "return f'{self.total} for {item}'", "    def get_reward": "    def reply(self, text):\n"
         "        self.given = text\n\n    def get_reward"},
        "tool result",
    ),
    "a tool hangs": (STORE, {PRICE: f"{PRICE} if item else time.sleep(60)"}, "empty tool calls"),
    "a tool ends the process": (STORE, {PRICE: f"{PRICE} if item else os._exit(0)"}, "empty tool calls"),
}  # fmt: skip
"""For each, a good environment, the texts that are replaced in it, and a finding that this must cause."""

RECIPE = (ROOT / "recipes" / "guess_lora.py").read_text(encoding="utf-8")
GUESS = (
    RECIPE
    + SAY
    + """
def gold(row):
    low, high, guesses = 1, HIGHEST, []
    while not guesses or guesses[-1] != row["number"]:
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if guesses[-1] < row["number"] else (low, guesses[-1] - 1)
    return [say(guess) for guess in guesses]
"""
)
CALCULATOR = (
    SUMS.replace("plus", "times")
    .replace('"sum": n + n * n % 31 + 50', '"sum": n * (n * n % 31 + 50)')
    .replace("gold", "answer")
    + '''
    def calculate(self, expression: str) -> str:
        """Calculate a product.

        Args:
            expression: such as "3 * 4".
        """
        first, second = re.fullmatch(r"(\\d+) \\* (\\d+)", expression).groups()
        return str(int(first) * int(second))

def gold(row):
    first, second = re.findall(r"\\d+", row["question"])
    return [call("calculate", expression=f"{first} * {second}"), *answer(row)]
'''
)
FORM = (
    SAY
    + '''
NAMES = "Ada Bob Cleo Dan Eve Finn Gus Hal".split()

def load(split):
    first = 3 if split == "train" else 11
    return [{"want": [name, day - 1, day]} for day, name in enumerate(NAMES, first)]

def prompt(row): return "Book a table for {}, {} persons, on day {}.".format(*row["want"])

def gold(row):
    name, persons, day = row["want"]
    calls = [call("set_name", name=name), call("set_table", persons=persons, day=day), call("send")]
    return [*calls, say(f"I booked a table for {name}.")]

class Environment:
    def reset(self, want, **row):
        self.want, self.form, self.sent = want, [None] * 3, None

    def set_name(self, name: str):
        """Set the name.

        Args:
            name: of the guest.
        """
        self.form[0] = name

    def set_table(self, persons: int, day: int, window: bool = False):
        """Set the rest.

        Args:
            persons: their number.
            day: of the month.
            window: whether the table is at a window.
        """
        self.form[1:] = [persons, day]

    def send(self) -> str:
        """Send the form."""
        self.sent = [*self.form]
        return f"sent: {self.form}"

    def get_reward(self) -> float:
        return float(self.sent == self.want)
'''
)
MAZE = (
    SAY
    + """
MAX_TURNS = 12
PATHS = "nnee eenn nene wwss sswn wnws essw nwne swwn eesn wsws nnnw".split()
STEPS = {"n": "north", "s": "south", "e": "east", "w": "west"}

def load(split):
    return [{"path": [STEPS[letter] for letter in path]} for path in PATHS[:: 1 if split == "train" else 2]]

def prompt(row): return "Find the way out: north, south, east or west?"
def gold(row): return [say(step) for step in row["path"]]

class Environment:
    def reset(self, path, **row):
        self.path, self.at = path, 0

    def reply(self, text):
        if text not in STEPS.values():
            return "Say a direction."
        self.at = self.at + 1 if text == self.path[self.at] else 0
        return ("You go on." if self.at else "You are at the start.") if self.at < len(self.path) else None

    def get_reward(self):
        return float(self.at == len(self.path))
"""
)
SQL = (
    STORE.replace("import os", "import sqlite3, os")
    .replace("def look_up(self, item: str)", "def _look_up(self, item)")
    .replace("None\n", 'None\n        self._store = sqlite3.connect(":memory:")\n        self._fill()\n')
    + '''
    def _fill(self):
        self._store.execute("create table goods (item text, price int)")
        self._store.executemany("insert into goods values (?, ?)", PRICES.items())

    def tables(self) -> str:
        """List the tables."""
        return str(self._store.execute("select sql from sqlite_master").fetchall())

    def query(self, sql: str) -> str:
        """Run a query.

        Args:
            sql: in the dialect of SQLite.
        """
        return str(self._store.execute(sql).fetchall()[:20])

def gold(row):
    sql = f"select {row['pieces']} * price from goods where item = '{row['item']}'"
    return [call("tables"), call("query", sql=sql), call("submit", total=str(PRICES[row["item"]] * row["pieces"]))]
'''
)
PARITY = (
    SUMS.replace("+ 50}?", "+ 50} even, yes or no?")
    .replace("+ 50} for", '+ 50, "even": n % 2} for')
    .replace('row["sum"]', '["yes", "no"][row["even"]]')
    .replace("sum, question, **row", "sum, question, even, **row")
    .replace("question, False", 'question, False; self.even = ["yes", "no"][even]')
    .replace("str(self.sum)", "self.even")
    .replace("None if self.right else", "None if text else")
)

MOSTLY_YES = (
    PARITY.replace('"even": n % 2', '"even": n % 5 // 3').replace("gold", "answer")
    + '''
    def look(self, number: int) -> str:
        """Look at a number.

        Args:
            number: of the question.
        """
        return f"{number} is known"

def gold(row): return [call("look", number=row["sum"]), *answer(row)]
'''
)

GOOD = {
    "the recipe": RECIPE,
    "a game of hints": GUESS,
    "sums": SUMS,
    "sums without gold": SUMS.replace("gold", "_gold"),
    "yes or no": PARITY,
    "mostly yes, after a look": MOSTLY_YES,
    "the first number counts": SUMS.replace(RIGHT, "re.findall(r'\\d+', text)[:1] == [str(self.sum)]"),
    "partial credit": SUMS.replace(REWARD, "1.0 if self.right else 0.2"),
    "several questions, and it changes its row": QUIZ,
    "a calculator": CALCULATOR,
    "a lookup, without reply, as for TRL": STORE,
    "a tool that exits": STORE.replace(PRICE, f"{PRICE} if item in PRICES else sys.exit(3)"),
    "a form": FORM,
    "a maze": MAZE,
    "a database": SQL,
    "chance, as the file says": SUMS.replace('"No."', 'f"No, not {random.random()}"')
    + 'AUDIT_IGNORE = ("repeated calls", "side by side")\n',
}


@pytest.fixture
def task(tmp_path):
    """Return a function that writes a task file and returns its path and opened rows."""

    def write(text, changes=()):
        for old, new in dict(changes).items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "my_task.py"
        path.write_text(text)
        file = get_task(str(path))
        return str(path), [file.with_opening({**row, "task": str(path)}) for row in file.load("train")]

    return write


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_environment_is_caught(task, name):
    text, changes, attack = BROKEN[name]
    path, rows = task(text, changes)
    assert attack in audit_task(path, rows, Limits(seconds_per_call=4.0)).problems


def test_the_table_has_a_broken_environment_for_every_attack():
    assert {attack for *_, attack in BROKEN.values()} == {GOLD, *NAMES}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_environment_raises_no_alarm(task, name):
    path, rows = task(GOOD[name])
    for limits in (FULL, QUICK):
        assert audit_task(path, rows, limits).problems == {}


def settings(path):
    return replace(RunConfig(), {"data": {"task": path}, "train": {"prompts_per_step": 1}})


def test_a_policy_may_pass_by_luck_on_half_of_the_rows(task):
    path, rows = task(PARITY)
    half = [row for row in rows if row["loaded_row"]["even"]]
    assert "copied words" not in audit_task(path, rows).problems
    assert "copied words" in audit_task(path, half).problems, "the last word of the question is no"


def test_chance_is_one_finding(task):
    path, rows = task(*BROKEN["reply draws at random"][:2])
    assert audit_task(path, rows).problems.keys() == {"repeated calls"}


def test_a_reward_for_an_empty_text_is_reported(task):
    path, rows = task(GOOD["partial credit"])
    notes = audit_task(path, rows).notes
    assert [note.split(":")[0] for note in notes] == ["empty text", "reward before the end"]
    assert all("0.2" in note for note in notes)


def test_the_limit_of_time_is_one_of_a_turn(task):
    only = f"AUDIT_IGNORE = {[name for name in NAMES if name != 'empty text']}"
    path, rows = task(SUMS + only, {'"No."': 'time.sleep(0.3) or "No."'})
    assert audit_task(path, rows[:1], Limits(seconds_per_call=2.0)).problems == {}, (
        "a conversation of eight turns takes 2.4 s"
    )


def test_the_audit_prints_conversations_and_ends_in_one_line(task, capsys):
    path, rows = task(*BROKEN["substring"][:2])
    with pytest.raises(
        RunError, match=r"^the audit found problems in my_task \(all answers at once\); fix Environment"
    ):
        refuse_problems(audit(settings(path), Data(rows, [], {})))
    (found,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FOUND")]
    assert found.startswith(
        "FOUND all answers at once: accepted on 16 of 16 rows, such as my_task/train/0: '[assistant]"
    )


def test_before_a_run_a_good_environment_is_one_line(task, capsys):
    path, _ = task(FORM)
    audit(settings(path), load_data(settings(path)), quick=True)
    assert capsys.readouterr().err == f"audit of my_task: passed; {len(NAMES) - 2} attacks on 16 of 16 rows\n"


def test_before_a_run_findings_are_warnings(task, capsys):
    path, rows = task(*BROKEN["nothing"][:2])
    audit(settings(path), Data(rows, [], {}), quick=True)
    assert "warning: audit: empty text: accepted on 16 of 16 rows" in capsys.readouterr().err


def test_before_a_run_a_hanging_tool_costs_a_limited_time(task, capsys, monkeypatch):
    monkeypatch.setattr(audit_tasks, "QUICK", dataclasses.replace(QUICK, seconds_per_call=2.0))
    path, rows = task(*BROKEN["a tool hangs"][:2])
    audit(settings(path), Data(rows, [], {}), quick=True)
    (finding,) = [line for line in capsys.readouterr().err.splitlines() if "empty tool calls" in line]
    assert finding.startswith("warning: audit: ") and "look_up" in finding


def test_before_a_run_a_reference_conversation_that_fails_is_an_error(task):
    path, rows = task(*BROKEN["gold is wrong"][:2])
    with pytest.raises(UserError, match=r"gold: rejected on 16 of 16 rows.*; fix gold or Environment"):
        audit(settings(path), Data(rows, [], {}), quick=True)


def test_attacks_of_a_check_are_none_of_an_environment(task):
    path, rows = task(SUMS + 'AUDIT_IGNORE = ("wrong value",)\n')
    with pytest.raises(UserError, match="AUDIT_IGNORE"):
        audit_task(path, rows)
