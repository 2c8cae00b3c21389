"""Several tasks in one table, with one statement about all of them.

Each task has its own paired test. Its p-value is adjusted by Holm's method, so that the probability of calling any
unchanged task better or worse is at most 5% for all tasks together. The intervals are those of single tasks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo import console
from lora_grpo.evaluation.comparison import SIGNIFICANT, Comparison, p_text
from lora_grpo.evaluation.pass_at_k import holm
from lora_grpo.evaluation.report import REPORT, Report, read_as
from lora_grpo.evaluation.schema import Schema
from lora_grpo.evaluation.tables import Table, comparison_cells
from lora_grpo.files import atomic, markdown, markdown_table, printable, text_table

ALSO = Path("joint/also")
"""Folder of the tasks in `eval.also`, inside the folder of a run's evaluation."""

_STATEMENTS = {-1: "worse in", 1: "better in", 0: "no significant change in"}
"""The words of the statement for the tasks of each `TaskComparison.direction`, in the order of the statement."""


class TaskComparison(Comparison):
    """The first metric of one task's report."""

    task: str
    problems: int
    """Number of problems that both models have samples of."""
    adjusted_p: float
    """The p-value adjusted by Holm's method for all tasks of the table."""

    @property
    def direction(self) -> int:
        """1 if the task is significantly better, -1 if it is worse, else 0."""
        if self.adjusted_p >= SIGNIFICANT:
            return 0
        if self.difference > 0:
            return 1
        return -1

    @property
    def task_and_possible_loss(self) -> str:
        """The task. If it has not changed significantly, also the largest loss in its interval, if there is one."""
        possible_loss = -100 * self.difference_interval[0]  # percentage points
        if self.direction != 0 or possible_loss <= 0:
            return self.task
        return f"{self.task} (a loss of up to {possible_loss:.1f} points is possible)"


class Joint(Schema):
    """Two models on several tasks: the labels of the baseline and the evaluated model, and a row per task."""

    labels: list[str]
    rows: list[TaskComparison]
    """Losses first."""

    def table(self) -> Table:
        """Return one row per task."""
        headings = ["", "problems", "metric", *self.labels, "difference", "p", "p (Holm)"]
        rows: list[tuple[str, ...]] = []
        for row in self.rows:
            p_values = (row.p_text, p_text(row.adjusted_p))
            rows.append((row.task, str(row.problems), row.metric, *comparison_cells(row), *p_values))
        return Table(headings, rows)

    @property
    def statement(self) -> str:
        """One sentence about all tasks: which changed, and how large a loss is possible in the others."""
        parts = []
        for direction, text in _STATEMENTS.items():
            tasks = [row.task_and_possible_loss for row in self.rows if row.direction == direction]
            if tasks:
                parts.append(f"{text} {', '.join(tasks)}")
        before, after = self.labels
        return f"{after} against {before} (p adjusted by Holm): {'; '.join(parts)}"

    @property
    def record(self) -> dict[str, Any]:
        """The statement and all fields, as in report.json and run.json."""
        return {"statement": self.statement, **self.model_dump()}

    def show(self, title: str) -> None:
        """Print the table below a title, and the statement."""
        lines = [title, *text_table(*self.table()), self.statement]
        console.result("\n".join(printable(line) for line in lines))

    def write(self, folder: Path) -> None:
        """Write report.json and report.md to a folder."""
        atomic.write_json(folder / REPORT, self.record)
        lines = [*markdown_table(*self.table()), markdown(self.statement)]
        atomic.write_text(folder / "report.md", "".join(f"{line}\n" for line in lines))


def read_also(evaluation: Path) -> Joint | None:
    """Return the joint report of the tasks in `eval.also` from the folder of a run's evaluation, if there is one."""
    return read_as(Joint, evaluation / ALSO)


def make_joint(reports: Sequence[Report]) -> Joint:
    """Combine the reports of several tasks, all of the same two models."""
    first_metrics = [report.table[0] for report in reports]
    adjusted = holm([comparison.p_value for comparison in first_metrics])
    rows = []
    for report, comparison, adjusted_p in zip(reports, first_metrics, adjusted, strict=True):
        row = TaskComparison(
            **comparison.model_dump(),
            task=report.protocol.task,
            problems=report.evaluated.tasks,
            adjusted_p=adjusted_p,
        )
        rows.append(row)
    rows.sort(key=lambda row: (row.direction, row.difference))
    return Joint(labels=[model.label for model in reports[0].models], rows=rows)
