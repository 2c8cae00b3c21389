"""What a task is: rows, and the grader of completions that training and evaluation share."""

from collections.abc import Mapping, Sequence
from typing import Any

from lora_grpo.grading import Row, Verdict, programs
from lora_grpo.tasks.agent_definition import AgentDefinition
from lora_grpo.tasks.environment import EnvironmentClass


class Task:
    """Rows, a grader and reference answers.

    A task defines `load`, `check`, `gold` and `grading`, and sets those of the attributes below that differ.
    """

    COLUMNS: tuple[str, ...] = ()
    """The columns that the task reads from a source. `--data.columns` can rename them; () if none can be renamed."""

    HUB_DATASET: str = ""
    """The Hub dataset that `load` reads without a source; "" if the rows are bundled or made."""

    @property
    def takes_source(self) -> bool:
        """Whether `load` reads `--data.train` and `--data.eval`."""
        return True

    @property
    def has_gold(self) -> bool:
        """Whether the rows have reference answers."""
        return True

    @property
    def has_own_prompts(self) -> bool:
        """Whether its rows have messages that no prompt style changes."""
        return False

    @property
    def has_teacher_prompt(self) -> bool:
        """Whether a teacher reads other prompts than the model that it teaches."""
        return False

    @property
    def grading(self) -> str:
        """How answers are graded, in one phrase, for reports and model cards."""
        raise NotImplementedError

    @property
    def environment(self) -> EnvironmentClass | None:
        """The class that answers the model in conversations; None if `check` grades a single completion."""
        return None

    @property
    def agent(self) -> AgentDefinition | None:
        """The program that plays episodes at an endpoint; None without one."""
        return None

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        """Return the rows of a split.

        Args:
            split: "train" or "eval".
            source: path of a JSON Lines, CSV or Parquet file, a Hub dataset id, or None for the task's default.
            columns: {our name: the source's name} for columns with another name in the source. Only tasks with
                `COLUMNS` get it.

        Raises:
            UserError: a source is missing, or a record is malformed.
        """
        raise NotImplementedError

    def check(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Grade one completion, which may be any string, against its row."""
        raise NotImplementedError

    def check_many(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """Grade B completions against their B rows. A task overrides this if it can grade a batch faster."""
        return [self.check(completion, row) for completion, row in zip(completions, rows, strict=True)]

    def gold(self, row: Mapping[str, Any]) -> Any:
        """Return a completion in the row's `prompt_style` that `check` accepts.

        With an environment, return the messages of the model in a conversation that passes.
        """
        raise NotImplementedError

    def teacher_prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages that a teacher reads in place of the row's prompt, if `has_teacher_prompt`."""
        raise NotImplementedError


class ProgramTask(Task):
    """A task whose completions are programs. The unit tests of their rows grade them in the sandbox.

    Its rows have the columns that `lora_grpo/grading/programs.py` describes.
    """

    grading = programs.GRADING

    def check(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        return programs.check(completion, row)

    def check_many(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        return programs.check_many(completions, rows)

    def gold(self, row: Mapping[str, Any]) -> str:
        return programs.gold(row)
