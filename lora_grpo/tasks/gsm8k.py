"""GSM8K: grade-school word problems with one number as the answer, or any data with a question and such an answer.

`lora_grpo/grading/numbers.py` has the rules of the grader.

Source: https://github.com/openai/grade-school-math
"""

from collections.abc import Mapping
from pathlib import Path

from lora_grpo.files import json_files
from lora_grpo.grading import Row, numbers
from lora_grpo.prompts import own_prompt
from lora_grpo.tasks import sources
from lora_grpo.tasks.columns import own_columns, row_ids, with_record

HUB_DATASET = "openai/gsm8k"
COLUMNS = ("question", "answer")

check = numbers.check
gold = numbers.gold


def load(split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
    """Return the rows of a split; see `Task.load`. All rows of a file are used for either split.

    Each record has a `question` and an `answer`, which is a number or a worked solution that ends with `#### N`. The
    `id` is that of the record, if each has another one, and else "gsm8k/test/17" or "<file stem>/17", counted from 0.
    A `prompt` that is a list of messages is what the model gets.
    """
    source = source or HUB_DATASET
    records = sources.read(source, split, COLUMNS, columns, "main" if source.partition("@")[0] == HUB_DATASET else None)
    prefix = json_files.stem(Path(source))
    if sources.is_on_hub(source):
        prefix = f"{'gsm8k' if source == HUB_DATASET else source}/{'train' if split == 'train' else 'test'}"
    names = row_ids([record for _, record in records], prefix)
    return [_row(record, name, where) for name, (where, record) in zip(names, records, strict=True)]


def _row(record: Row, row_id: str, where: str) -> Row:
    """Return the row of a record, or raise UserError. The answer may be a JSON number."""
    row = {**own_columns(record), "id": row_id, **own_prompt(record, where)}
    answer = record["answer"]
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        row["answer"] = str(answer)
    sources.texts(row, COLUMNS, where)
    numbers.gold_number(row, where)
    return with_record(row, record, where)
