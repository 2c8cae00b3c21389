"""Programs that may be repaired: the model writes one, reads which call failed, and writes it again, at most 3 times.

Rows are those of `starter-code`, or rows like MBPP's from `--data.train` and `--data.eval`. Programs are graded by
`code_grading`, as in the tasks of one turn. The reward of a program that passes falls with each try.

No expected value reaches the model. Of the first assert that fails, it reads the calls of its own function, such as
`adjust(5)`, but not what they are compared with. Of an exception, it reads only the class, because the tests may have
raised it, with a text that contains a value. Syntax errors are quoted, because they occur before the tests run. It
learns neither the results of other asserts nor their number.
"""

import ast
import builtins
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_grpo import starter
from lora_grpo.errors import UserError
from lora_grpo.grading import Row, Verdict, programs
from lora_grpo.prompts import styles
from lora_grpo.tasks import mbpp
from lora_grpo.tasks.task_file import TaskFile, of_module

SCORES = (1.0, 0.9, 0.8)
"""The reward of a program that passes, by the number of its try."""
MAX_TURNS = len(SCORES)
SYSTEM_PROMPT = styles.SYSTEM_PROMPTS["code"]
SECONDS_PER_CALL = 0  # the sandbox has its own limit

_GRADED_WITH = {"question", "answer", "entry_point", "test", "prelude", "functions", "completion_prefix", "seconds"}
"""Columns that the grader reads."""
_MOST_CHARACTERS = 200
_ENDS = {
    "no_code": "There is no function `{name}` in your answer.",
    "timeout": "`{name}` takes too long.",
    "memory": "`{name}` needs too much memory.",
    "crashed": "Your program ends its process.",
    "blocked": "Your program does something that is forbidden here.",
}

check = programs.check


def read(name: str) -> TaskFile:
    """Return the task."""
    return of_module(Path(__file__), sys.modules[__name__])


def load(split: str, source: str | None = None) -> list[Row]:
    """Return the rows of a split, of `starter-code` or of a source with MBPP's columns."""
    if source is None:
        return starter.problems("starter-code", split)
    # The environment reads the entries that MBPP's loader adds, and rewards also get the columns of the source.
    rows = []
    for row in programs.solvable(mbpp.load(split, source)):
        columns = row.pop("loaded_row")
        if taken := sorted(_GRADED_WITH & columns.keys()):
            raise UserError(f"{source}: code-with-feedback makes a column {taken[0]!r} itself; rename yours")
        rows.append({**row, **columns})
    return rows


def prompt(row: Mapping[str, Any]) -> str:
    """Return the question, also of rows that have a column `prompt`."""
    return str(row["question"])


def gold(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the conversation in which the first program is the reference."""
    return [{"role": "assistant", "content": programs.gold(row)}]


class Environment:
    """The tries at one row."""

    def reset(self, **row: Any) -> None:
        self.row, self.tries = row, 0
        self.verdict = Verdict(False, "no_code", score=0.0, tests=(0, 0))  # if the first turn is cut

    def reply(self, text: str) -> str | None:
        """Grade a program, and return what the model reads if it fails."""
        self.tries += 1
        graded = check(text, self.row)
        self.verdict = replace(graded, score=SCORES[self.tries - 1] if graded.passed else 0.0)
        return None if graded.passed else f"{problem(graded, self.row)} Write the whole program again."

    def get_reward(self) -> Verdict:
        return self.verdict


def problem(verdict: Verdict, row: Mapping[str, Any]) -> str:
    """Return what is wrong with a program that failed, without an expected value."""
    name, detail = row["entry_point"], verdict.detail or ""
    if verdict.reason == "invalid":
        return f"{detail}."
    if verdict.reason in _ENDS:
        return _ENDS[verdict.reason].format(name=name)
    lines = [line.strip() for line in row["test"].splitlines()]
    tested = max((line for line in lines if line and line[:_MOST_CHARACTERS] in detail), key=len, default="")
    raised = re.match(r"[A-Za-z_]\w*(?=:)", detail)
    if raised:  # the text is the program's own, which could ask whether an assert that it wrote is in the tests
        return f"`{name}` raises {raised[0] if hasattr(builtins, raised[0]) else 'Exception'}."
    try:
        nodes = [node for node in ast.walk(ast.parse(tested)) if isinstance(node, ast.Call)]
        calls = [ast.unparse(node)[:_MOST_CHARACTERS] for node in nodes if ast.unparse(node.func) == name]
    except SyntaxError:  # a line of a longer assert
        calls = []
    where = " or ".join(f"`{call}`" for call in calls) or f"`{name}`"
    return f"{where} is wrong."
