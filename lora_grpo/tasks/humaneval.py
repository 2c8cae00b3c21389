"""HumanEval: 164 Python functions to complete, graded with unit tests, or a file in the same format.

Source: Chen et al. 2021 (arXiv:2107.03374), https://github.com/openai/human-eval. The question's wording follows
https://github.com/deepseek-ai/DeepSeek-Coder (`Evaluation/HumanEval/eval_instruct.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from lora_grpo.tasks import sources
from lora_grpo.tasks.code_grading import check, check_many, gold
from lora_grpo.tasks.registry import Row

__all__ = ["check", "check_many", "gold", "load"]

HUB_DATASET = "openai/openai_humaneval"

COLUMNS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
_QUESTION = (
    "Please continue to complete the function. You are not allowed to modify the given code and do the completion "
    "only. Please return all completed function in a codeblock. Here is the given code to do completion:\n"
    "```python\n{}\n```"
)


def load(split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
    """Return all rows for either split, because the dataset has a single one; see `Task.load`."""
    source = source or HUB_DATASET
    records = sources.read(source, "test", COLUMNS, columns)
    return sources.unique([_row(record, where) for where, record in records], source)


def _row(record: Row, where: str) -> Row:
    task_id, prompt, entry_point, solution, test = sources.texts(record, COLUMNS, where)
    return {
        "id": task_id,
        "question": _QUESTION.format(prompt.strip("\n")),
        "answer": prompt + solution,
        "entry_point": entry_point,
        "test": f"{test}\n\ncheck({entry_point})\n",
        # The tests of 32, 38 and 50 use the prompt's helper functions.
        "prelude": prompt,
        "completion_prefix": prompt,
    }
