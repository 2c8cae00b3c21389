"""Several tasks in one table, with one statement about all of them.

Each task has its own paired test. Its p-value is adjusted by Holm's method, so that the probability of calling any
unchanged task better or worse is at most 5% for all tasks together. The intervals are those of single tasks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_grpo import console
from lora_grpo.evaluation.measurement import SIGNIFICANT, Comparison, Schema, percent
from lora_grpo.evaluation.pass_at_k import holm
from lora_grpo.evaluation.report import REPORT, Report, Table, read_as, text_table
from lora_grpo.files import atomic, markdown, markdown_table, printable

ALSO = Path("joint/also")
"""Folder of the tasks in `eval.also`, in that of a run's evaluation."""


class TaskComparison(Comparison):
    """The first metric of one task's report."""

    task: str
    problems: int
    adjusted_p: float

    @property
    def direction(self) -> int:
        """1 if the task is significantly better, -1 if it is worse, else 0."""
        return 0 if self.adjusted_p >= SIGNIFICANT else 1 if self.difference > 0 else -1

    @property
    def name(self) -> str:
        """The task, and the loss that its interval does not exclude if it has not changed significantly."""
        lost = -100 * self.difference_interval[0]
        if self.direction or lost <= 0:
            return self.task
        return f"{self.task} (a loss of up to {lost:.1f} points is possible)"


class Joint(Schema):
    """Two models on several tasks: the labels of the baseline and the evaluated model, and a row per task."""

    labels: list[str]
    rows: list[TaskComparison]
    """Losses first."""

    def table(self) -> Table:
        """Return one row per task."""
        return ["", "problems", "metric", *self.labels, "difference", "p", "p (Holm)"], [
            (
                *(row.task, str(row.problems), row.metric),
                percent(row.before, row.before_interval),
                percent(row.after, row.after_interval),
                percent(row.difference, row.difference_interval, "+"),
                *(row.p_text, row.model_copy(update={"p_value": row.adjusted_p}).p_text),
            )
            for row in self.rows
        ]

    @property
    def statement(self) -> str:
        """One sentence about all tasks: which changed, and how large a loss is possible in the others."""
        found = []
        for direction, text in ((-1, "worse in"), (1, "better in"), (0, "no significant change in")):
            if names := [row.name for row in self.rows if row.direction == direction]:
                found.append(f"{text} {', '.join(names)}")
        return f"{self.labels[1]} against {self.labels[0]} (p adjusted by Holm): {'; '.join(found)}"

    @property
    def record(self) -> dict[str, Any]:
        """The statement and all fields, as in report.json and run.json."""
        return {"statement": self.statement, **self.model_dump()}

    def show(self, title: str) -> None:
        """Print the table below a title, and the statement."""
        console.result("\n".join(map(printable, (title, *text_table(*self.table()), self.statement))))

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
    changes = [report.table[0] for report in reports]
    rows = [
        TaskComparison(
            **change.model_dump(), task=report.protocol.task, problems=report.evaluated.tasks, adjusted_p=adjusted
        )
        for report, change, adjusted in zip(reports, changes, holm([change.p_value for change in changes]), strict=True)
    ]
    rows.sort(key=lambda row: (row.direction, row.difference))
    return Joint(labels=[model.label for model in reports[0].models], rows=rows)
