"""Mathematics: competition problems whose answers are numbers, expressions, sets or intervals, graded by math-verify.

`math` trains on the training set of MATH and is evaluated on MATH-500. `math500`, `aime24` and `aime25` are benchmarks.
Other rows, from `--data.train` and `--data.eval`, have a `question` or `problem`, and an `answer` in LaTeX or a
`solution` that marks its answer, as by `\\boxed{}`. `lora_grpo/grading/mathematics.py` has the rules of the grader.

Sources: Hendrycks et al. 2021 (arXiv:2103.03874) for MATH; Lightman et al. 2023 (arXiv:2305.20050) for MATH-500.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import json_files
from lora_grpo.grading import Row, Verdict, find_answers, mathematics
from lora_grpo.prompts import prompt_of_record
from lora_grpo.tasks import sources
from lora_grpo.tasks.columns import row_ids, with_loaded_columns, without_row_entries
from lora_grpo.tasks.task import Task

_DATASETS = {
    "math": {"train": "DigitalLearningGmbH/MATH-lighteval", "eval": "HuggingFaceH4/MATH-500"},
    "math500": {"eval": "HuggingFaceH4/MATH-500"},
    "aime24": {"eval": "HuggingFaceH4/aime_2024@train"},
    "aime25": {"eval": "math-ai/aime25"},
}
"""The dataset of each split, by task."""


@dataclass(frozen=True)
class Mathematics(Task):
    """The problems of one task."""

    COLUMNS = ("question", "answer")
    grading = mathematics.GRADING

    name: str
    """A key of `_DATASETS`."""

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        """Return the rows of a split of a task; see `Task.load`."""
        dataset = source or _DATASETS[self.name].get(split)
        if dataset is None:
            raise UserError(f"{self.name} is a benchmark without training rows; pass --data.train, or --task math")
        records = sources.read(dataset, split, (), columns)

        prefix = dataset if sources.is_on_hub(dataset) else json_files.stem(Path(dataset))
        if source:
            ids = row_ids([record.columns for record in records], prefix)
        else:  # the rows of a benchmark are numbered, whatever ids its dataset has
            ids = [f"{prefix}/{index}" for index in range(len(records))]
        return [_row(record, row_id) for row_id, record in zip(ids, records, strict=True)]

    def check(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        return mathematics.check(completion, row)

    def gold(self, row: Mapping[str, Any]) -> str:
        return mathematics.gold(row)


def make_task(name: str) -> Mathematics:
    """Return one of the tasks of `_DATASETS`."""
    return Mathematics(name)


def _row(record: sources.Record, row_id: str) -> Row:
    columns = record.columns
    row = {"question": columns.get("problem"), "answer": columns.get("solution"), **without_row_entries(columns)}
    row |= {"id": row_id, **prompt_of_record(columns, record.where)}
    if isinstance(row["answer"], int | float):
        row["answer"] = str(row["answer"])
    sources.texts(row, Mathematics.COLUMNS, record.where)
    mathematics.final_answer(row, record.where)  # refuses a row without an answer
    if "answer" not in columns and not find_answers(row["answer"]):  # the whole solution would be the reference
        raise UserError(
            f"{record.where}: the solution ends with {row['answer'].strip()[-60:]!r} and marks no answer; expected "
            "\\boxed{} around it, or a column 'answer'"
        )
    return with_loaded_columns(row, columns, record.where)
