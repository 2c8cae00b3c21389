"""HumanEval and HumanEval+: 164 Python functions to complete, graded with unit tests, or a file in the same format.

Source: Chen et al. 2021 (arXiv:2107.03374), https://github.com/openai/human-eval; Liu et al. 2023 (arXiv:2305.01210),
https://github.com/evalplus/evalplus. The question's wording follows https://github.com/deepseek-ai/DeepSeek-Coder
(`Evaluation/HumanEval/eval_instruct.py`).
"""

from collections.abc import Mapping

from lora_grpo.grading import Row, programs
from lora_grpo.tasks import sources
from lora_grpo.tasks.columns import with_record
from lora_grpo.tasks.evalplus_columns import plus_columns

HUB_DATASET, PLUS_DATASET = "openai/openai_humaneval", "evalplus/humanevalplus"

COLUMNS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
_QUESTION = (
    "Please continue to complete the function. You are not allowed to modify the given code and do the completion "
    "only. Please return all completed function in a codeblock. Here is the given code to do completion:\n"
    "```python\n{}\n```"
)

check = programs.check
check_many = programs.check_many
gold = programs.gold


def load(split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
    """Return all rows for either split, because the dataset has a single one; see `Task.load`."""
    source = source or HUB_DATASET
    rows = []
    for where, record in sources.read(source, "test", COLUMNS, columns):
        row, (test,) = _row(record, where), sources.texts(record, ("test",), where)
        test = f"{test}\n\ncheck({row['entry_point']})\n"
        # The tests of 32, 38 and 50 use the prompt's helper functions.
        row |= {"test": test, "prelude": row["completion_prefix"]}
        rows.append(with_record(row, record, where))
    return sources.unique(rows, source)


def load_plus(split: str, source: str | None = None) -> list[Row]:
    """Return all rows of HumanEval+, from a file of EvalPlus's release or from the Hub."""
    source = source or PLUS_DATASET
    rows = []
    for where, record in sources.read(source, "test", COLUMNS[:-1]):
        row = _row(record, where)
        rows.append(row | plus_columns(record, where, row["answer"], row["entry_point"]))
    return sources.unique(rows, source)


def _row(record: Row, where: str) -> Row:
    """Return a row without tests."""
    task_id, prompt, entry_point, solution = sources.texts(record, COLUMNS[:-1], where)
    return {
        "id": task_id,
        "question": _QUESTION.format(prompt.strip("\n")),
        "answer": prompt + solution,
        "entry_point": entry_point,
        "completion_prefix": prompt,
    }
