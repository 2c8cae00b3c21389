"""Tasks with an `Environment`, as Python classes: games, tools and forms whose rewards cannot be cheated.

The methods that begin with an underscore are no tools. Broken environments replace one of them.
"""

import random
import re
import sqlite3
import sys

from helpers.fresh_imports import ROOT

from lora_grpo.tasks import get_task


def say(text):
    """Return a message of the model with a text."""
    return {"role": "assistant", "content": str(text)}


def call(name, /, **arguments):
    """Return a message of the model that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


class SumsWithoutGold:
    """A sum. Until an answer is right, the environment replies "No."."""

    def load(self, split):
        numbers = range(10, 30) if split == "train" else range(40, 60)
        return [self._row(number, number * number % 31 + 50) for number in numbers]

    def _row(self, first, second):
        return {"question": f"What is {first} plus {second}?", "sum": first + second}

    class Environment:
        def reset(self, sum, question, **row):
            self.sum = sum
            self.question = question
            self.is_right = False

        def reply(self, text):
            self.is_right = self._accepts(text)
            if self.is_right:
                return None
            return self._hint()

        def get_reward(self):
            return float(self.is_right)

        def _accepts(self, text):
            return text.strip() == str(self.sum)

        def _hint(self):
            return "No."


class Sums(SumsWithoutGold):
    def gold(self, row):
        return [say(row["sum"])]


class FirstNumberOfText(Sums):
    class Environment(Sums.Environment):
        def _accepts(self, text):
            return re.findall(r"\d+", text)[:1] == [str(self.sum)]


class SumsWithPartialCredit(Sums):
    class Environment(Sums.Environment):
        def get_reward(self):
            return 1.0 if self.is_right else 0.2


class SumsWithRandomReplies(Sums):
    AUDIT_IGNORE = ("repeated calls", "side by side")

    class Environment(Sums.Environment):
        def _hint(self):
            return f"No, not {random.random()}"


class EvenSums(Sums):
    """Yes or no: half of the rows have each answer. Any answer ends the conversation."""

    def _row(self, first, second):
        question = f"What is {first} plus {second} even, yes or no?"
        return {"question": question, "sum": first + second, "answer_word": self._answer_word(first)}

    def _answer_word(self, first):
        return "no" if first % 2 else "yes"

    def gold(self, row):
        return [say(row["answer_word"])]

    class Environment(Sums.Environment):
        def reset(self, answer_word, **row):
            super().reset(**row)
            self.answer_word = answer_word

        def reply(self, text):
            self.is_right = text.strip() == self.answer_word
            return None if text else "No."


class MostlyYesAfterALook(EvenSums):
    """Three of five answers are yes. The reference calls a tool first."""

    def _answer_word(self, first):
        return "no" if first % 5 >= 3 else "yes"

    def gold(self, row):
        return [call("look", number=row["sum"]), *super().gold(row)]

    class Environment(EvenSums.Environment):
        def look(self, number: int) -> str:
            """Look at a number.

            Args:
                number: of the question.
            """
            return f"{number} is known"


class Calculator(Sums):
    """A product. A tool computes it, and the model says the result."""

    def _row(self, first, second):
        return {"question": f"What is {first} times {second}?", "sum": first * second}

    def gold(self, row):
        first, second = re.findall(r"\d+", row["question"])
        return [call("calculate", expression=f"{first} * {second}"), *super().gold(row)]

    class Environment(Sums.Environment):
        def calculate(self, expression: str) -> str:
            """Calculate a product.

            Args:
                expression: such as "3 * 4".
            """
            first, second = re.fullmatch(r"(\d+) \* (\d+)", expression).groups()
            return str(int(first) * int(second))


GOODS = [
    "lamp",
    "table",
    "chair",
    "carpet",
    "shelf",
    "mirror",
    "clock",
    "vase",
    "plate",
    "spoon",
    "fork",
    "knife",
    "bowl",
    "glass",
    "towel",
    "pillow",
]
PRICES = {item: 7 + 13 * number % 89 for number, item in enumerate(GOODS)}


class Store:
    """The price of several pieces: the model looks up the price of one and submits the product. There is no `reply`."""

    def load(self, split):
        pieces = 3 if split == "train" else 4
        return [{"question": f"How much are {pieces} of {item}?", "item": item, "pieces": pieces} for item in GOODS]

    def gold(self, row):
        return [call("look_up", item=row["item"]), self._submission(row)]

    def _submission(self, row):
        return call("submit", total=str(PRICES[row["item"]] * row["pieces"]))

    class Environment:
        def reset(self, item, pieces, **row):
            self.total = str(PRICES[item] * pieces)
            self.submitted = None

        def look_up(self, item: str):
            """Return the price of one piece.

            Args:
                item: its name.
            """
            return self._price(item)

        def submit(self, total: str):
            """Submit the answer.

            Args:
                total: the price of all pieces.
            """
            self._take(total)
            return "submitted"

        def get_reward(self):
            return float(self._accepts())

        def _price(self, item):
            return PRICES[item]

        def _take(self, total):
            self.submitted = total

        def _accepts(self):
            return self.submitted == self.total


class StoreWhoseToolExits(Store):
    class Environment(Store.Environment):
        def _price(self, item):
            return PRICES[item] if item in PRICES else sys.exit(3)


class Database:
    """The price of several pieces, which is in a database."""

    load = Store.load
    _submission = Store._submission

    def gold(self, row):
        sql = f"select {row['pieces']} * price from goods where item = '{row['item']}'"
        return [call("tables"), call("query", sql=sql), self._submission(row)]

    class Environment:
        def reset(self, item, pieces, **row):
            self.total = str(PRICES[item] * pieces)
            self.submitted = None
            self._store = sqlite3.connect(":memory:")
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

        def submit(self, total: str):
            """Submit the answer.

            Args:
                total: the price of all pieces.
            """
            self.submitted = total
            return "submitted"

        def get_reward(self):
            return float(self.submitted == self.total)


CAPITALS = {
    "France": "Paris",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Iran": "Tehran",
    "Egypt": "Cairo",
}


class Quiz:
    """Three questions, with a third of the reward for each. The environment empties a list of its row."""

    def load(self, split):
        countries = list(CAPITALS)
        if split != "train":
            countries.reverse()
        twice = [*countries, *countries]
        return [{"countries": twice[first : first + 3]} for first in range(len(countries))]

    def prompt(self, row):
        return f"Three questions. What is the capital of {row['countries'][0]}?"

    def gold(self, row):
        return [say(CAPITALS[country]) for country in row["countries"]]

    class Environment:
        def reset(self, countries, **row):
            self.countries = countries
            self.points = 0

        def reply(self, text):
            capital = CAPITALS[self.countries.pop(0)]
            self.points += text.strip().casefold() == capital.casefold()
            if not self.countries:
                return None
            return self._next_question()

        def get_reward(self):
            return self.points / 3

        def _next_question(self):
            return f"And of {self.countries[0]}?"


class HintsByHalving:
    """The game of recipes/guess_lora.py. The reference halves the interval."""

    _recipe = get_task(str(ROOT / "recipes" / "guess_lora.py")).module
    load = staticmethod(_recipe.load)
    Environment = _recipe.Environment
    MAX_TURNS = _recipe.MAX_TURNS
    THRESHOLD = _recipe.THRESHOLD

    def gold(self, row):
        low = 1
        high = self._recipe.HIGHEST
        guesses = []
        while row["number"] not in guesses:
            guess = (low + high) // 2
            guesses.append(guess)
            if guess < row["number"]:
                low = guess + 1
            else:
                high = guess - 1
        return [say(guess) for guess in guesses]


GUESTS = ["Ada", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal"]


class Form:
    """A form with three entries, which tools fill in and send. The last message of the reference is free text."""

    def load(self, split):
        first_day = 3 if split == "train" else 11
        return [{"booking": [name, day - 1, day]} for day, name in enumerate(GUESTS, first_day)]

    def prompt(self, row):
        name, persons, day = row["booking"]
        return f"Book a table for {name}, {persons} persons, on day {day}."

    def gold(self, row):
        name, persons, day = row["booking"]
        return [
            call("set_name", name=name),
            call("set_table", persons=persons, day=day),
            call("send"),
            say(f"I booked a table for {name}."),
        ]

    class Environment:
        def reset(self, booking, **row):
            self.booking = booking
            self.form = [None] * 3
            self.sent = None

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
            return float(self.sent == self.booking)


PATHS = ["nnee", "eenn", "nene", "wwss", "sswn", "wnws", "essw", "nwne", "swwn", "eesn", "wsws", "nnnw"]
DIRECTIONS = {"n": "north", "s": "south", "e": "east", "w": "west"}


class Maze:
    """Four steps to the way out. A wrong step leads back to the start."""

    MAX_TURNS = 12

    def load(self, split):
        paths = PATHS if split == "train" else PATHS[::2]
        return [{"path": [DIRECTIONS[letter] for letter in path]} for path in paths]

    def prompt(self, row):
        return "Find the way out: north, south, east or west?"

    def gold(self, row):
        return [say(step) for step in row["path"]]

    class Environment:
        def reset(self, path, **row):
            self.path = path
            self.steps_done = 0

        def reply(self, text):
            if text not in DIRECTIONS.values():
                return "Say a direction."
            if text != self.path[self.steps_done]:
                self.steps_done = 0
                return "You are at the start."
            self.steps_done += 1
            if self.steps_done == len(self.path):
                return None
            return "You go on."

        def get_reward(self):
            return float(self.steps_done == len(self.path))
