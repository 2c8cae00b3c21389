"""The bundled problems: arithmetic in words, and small functions. `lora_grpo/starter/` has the rows."""

from collections.abc import Mapping
from typing import Any

from lora_grpo import starter
from lora_grpo.errors import UserError
from lora_grpo.grading import Row, Verdict, numbers
from lora_grpo.tasks.task import ProgramTask, Task


class StarterMath(Task):
    """Word problems with one number as the answer."""

    grading = numbers.GRADING

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        return _bundled_rows("starter", split, source)

    def check(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        return numbers.check(completion, row)

    def gold(self, row: Mapping[str, Any]) -> str:
        return numbers.gold(row)


class StarterCode(ProgramTask):
    """Functions of one or two lines."""

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        return _bundled_rows("starter-code", split, source)


def make_task(name: str) -> Task:
    """Return the task `starter` or `starter-code`."""
    return StarterMath() if name == "starter" else StarterCode()


def _bundled_rows(name: str, split: str, source: str | None) -> list[Row]:
    if source is not None:
        raise UserError(f"the {name} task uses its bundled problems, got source {source!r}; remove the source")
    return starter.problems(name, split)
