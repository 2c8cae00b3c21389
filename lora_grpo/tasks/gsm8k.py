"""GSM8K: grade-school word problems with one number as the answer, or any data with a question and such an answer.

`lora_grpo/grading/numbers.py` has the rules of the grader.

Source: https://github.com/openai/grade-school-math
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_grpo.files import json_files
from lora_grpo.grading import Row, Verdict, numbers
from lora_grpo.prompts import prompt_of_record
from lora_grpo.tasks import sources
from lora_grpo.tasks.columns import row_ids, with_loaded_columns, without_row_entries
from lora_grpo.tasks.task import Task


class GSM8K(Task):
    """Word problems. Records have a `question` and an `answer`: a number, or a solution that ends with `#### N`."""

    COLUMNS = ("question", "answer")
    HUB_DATASET = "openai/gsm8k"
    grading = numbers.GRADING

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        """Return the rows of a split; see `Task.load`. All rows of a file are used for either split.

        The `id` is that of the record, if each has another one, and else "gsm8k/test/17" or "<file stem>/17", counted
        from 0. A `prompt` that is a list of messages is what the model gets.
        """
        source = source or self.HUB_DATASET
        dataset, _, _ = source.partition("@")  # the source may name a split: openai/gsm8k@test
        hub_config = "main" if dataset == self.HUB_DATASET else None
        records = sources.read(source, split, self.COLUMNS, columns, hub_config)

        if sources.is_on_hub(source):
            name = "gsm8k" if source == self.HUB_DATASET else source
            prefix = f"{name}/{'train' if split == 'train' else 'test'}"
        else:
            prefix = json_files.stem(Path(source))
        ids = row_ids([record.columns for record in records], prefix)
        return [_row(record, row_id) for row_id, record in zip(ids, records, strict=True)]

    def check(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        return numbers.check(completion, row)

    def gold(self, row: Mapping[str, Any]) -> str:
        return numbers.gold(row)


def make_task(name: str) -> GSM8K:
    """Return the task."""
    return GSM8K()


def _row(record: sources.Record, row_id: str) -> Row:
    """Return the row of a record, or raise UserError. The answer may be a JSON number."""
    row = {**without_row_entries(record.columns), "id": row_id, **prompt_of_record(record.columns, record.where)}
    answer = record.columns["answer"]
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        row["answer"] = str(answer)
    sources.texts(row, GSM8K.COLUMNS, record.where)
    numbers.gold_number(row, record.where)
    return with_loaded_columns(row, record.columns, record.where)
