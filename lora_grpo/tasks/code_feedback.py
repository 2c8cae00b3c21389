"""Programs that may be repaired: the model writes one, reads which call failed, and writes it again, at most 3 times.

Rows are those of `starter-code`, or rows like MBPP's from `--data.train` and `--data.eval`. Programs are graded by
`lora_grpo/grading/programs.py`, as in the tasks of one turn. The reward of a program that passes falls with each try.

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
from lora_grpo.tasks.task_file import TaskFile, task_of_module

SCORES = (1.0, 0.9, 0.8)
"""The reward of a program that passes, by the number of its try."""
MAX_TURNS = len(SCORES)
SYSTEM_PROMPT = styles.SYSTEM_PROMPTS["code"]
SECONDS_PER_CALL = 0  # the sandbox has its own limit

_GRADED_WITH = {"question", "answer", "entry_point", "test", "prelude", "functions", "completion_prefix", "seconds"}
"""Columns that the grader reads."""
_MAX_CHARACTERS = 200
"""Of a call that the model reads, and of the part of a test that is searched for in the failed assert."""
_ENDS = {
    "no_code": "There is no function `{name}` in your answer.",
    "timeout": "`{name}` takes too long.",
    "memory": "`{name}` needs too much memory.",
    "crashed": "Your program ends its process.",
    "blocked": "Your program does something that is forbidden here.",
}
"""What the model reads if no assert failed, by the reason of the verdict."""


def make_task(name: str) -> TaskFile:
    """Return the task: this module has the form of a task file."""
    return task_of_module(Path(__file__), sys.modules[__name__])


def load(split: str, source: str | None = None) -> list[Row]:
    """Return the rows of a split, of `starter-code` or of a source with MBPP's columns."""
    if source is None:
        return starter.problems("starter-code", split)
    # The environment reads the entries that MBPP's loader adds, and rewards also get the columns of the source.
    rows = []
    for row in programs.solvable(mbpp.MBPP().load(split, source)):
        columns_of_source = row.pop("loaded_row")
        clashes = sorted(_GRADED_WITH & columns_of_source.keys())
        if clashes:
            raise UserError(f"{source}: code-with-feedback makes a column {clashes[0]!r} itself; rename yours")
        rows.append({**row, **columns_of_source})
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
        self.row = row
        self.tries = 0
        self.verdict = Verdict(False, "no_code", score=0.0, tests=(0, 0))  # if the first turn is cut

    def reply(self, text: str) -> str | None:
        """Grade a program, and return what the model reads if it fails."""
        self.tries += 1
        graded = programs.check(text, self.row)
        if graded.passed:
            self.verdict = replace(graded, score=SCORES[self.tries - 1])
            return None
        self.verdict = replace(graded, score=0.0)
        return f"{problem(graded, self.row)} Write the whole program again."

    def get_reward(self) -> Verdict:
        return self.verdict


def problem(verdict: Verdict, row: Mapping[str, Any]) -> str:
    """Return what is wrong with a program that failed, without an expected value."""
    name = row["entry_point"]
    detail = verdict.detail or ""
    if verdict.reason == "invalid":
        return f"{detail}."
    if verdict.reason in _ENDS:
        return _ENDS[verdict.reason].format(name=name)

    # Of an exception, only the class. Its text may be the program's. If it were compared with the tests, as below, the
    # reply would tell a program that raises a guessed assert whether the tests contain this assert.
    exception = re.match(r"[A-Za-z_]\w*(?=:)", detail)
    if exception:
        class_name = exception[0] if hasattr(builtins, exception[0]) else "Exception"
        return f"`{name}` raises {class_name}."

    wrong_code = _calls(_failed_assert(detail, row), name) or [name]
    return f"{' or '.join(f'`{code}`' for code in wrong_code)} is wrong."


def _failed_assert(detail: str, row: Mapping[str, Any]) -> str:
    """Return the longest line of the tests that the sandbox quotes, or ""."""
    lines = [line.strip() for line in row["test"].splitlines()]
    quoted = [line for line in lines if line and line[:_MAX_CHARACTERS] in detail]
    return max(quoted, key=len, default="")


def _calls(line: str, name: str) -> list[str]:
    """Return the calls of a function in a line of code; none if the line is only a part of a statement."""
    try:
        tree = ast.parse(line)
    except SyntaxError:
        return []
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            calls.append(ast.unparse(node)[:_MAX_CHARACTERS])
    return calls
