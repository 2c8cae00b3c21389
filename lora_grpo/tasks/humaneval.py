"""HumanEval: 164 Python functions to complete, each decided by unit tests; or a file of the same shape.

All rows are one split upstream, so "train" and "eval" read the same ones; `data.load_data` leaves out of the evaluation
what was trained on, and says so.

Source: Chen et al. 2021 (arXiv:2107.03374), https://github.com/openai/human-eval. The question's wording is that of
https://github.com/deepseek-ai/DeepSeek-Coder (`Evaluation/HumanEval/eval_instruct.py`), which other reports use too.
"""

from __future__ import annotations

import ast
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.tasks import sources
from lora_grpo.tasks.code_grading import gold_completion, grade, grade_many
from lora_grpo.tasks.registry import Row

__all__ = ["gold_completion", "grade", "grade_many", "load"]

HUB_DATASET = "openai/openai_humaneval"
ONE_SPLIT = True
"""There is no training split: whoever trains on these rows takes them from the evaluation."""

_KEYS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
_QUESTION = (
    "Please continue to complete the function. You are not allowed to modify the given code and do the completion "
    "only. Please return all completed function in a codeblock. Here is the given code to do completion:\n"
    "```python\n{}\n```"
)


def load(split: str, source: str | None = None, limit: int | None = None, seed: int = 0) -> list[Row]:
    """Return the rows.

    Args:
        split: "train" or "eval"; both are all rows.
        source: a `.jsonl` or `.jsonl.gz` file, a data set's name on the Hub, or None for `openai/openai_humaneval`.
        limit: keep this many rows, drawn with `seed` without replacement and kept in order; None keeps all.
        seed: seed of that draw.

    Returns:
        Rows with upstream's `id` ("HumanEval/17"), `question`, `answer` (prompt and reference solution), `entry_point`,
        `test` (with its call), `prelude` and `completion_prefix` (both the prompt, as it stands).

    Raises:
        UserError: the source is missing, unreadable or empty, or a row is malformed.
    """
    sources.check_request(split, limit)
    if sources.is_on_hub(source):
        found = sources.read_hub(source or HUB_DATASET, None, "test")
    else:
        found = list(sources.read_file(str(source), ", ".join(map(repr, _KEYS))))
    rows = [_row(record, where) for where, record in found]
    sources.check_ids(rows, source or HUB_DATASET)
    return sources.draw(rows, limit, seed)


def _row(record: Any, where: str) -> Row:
    task_id, prompt, entry_point, solution, test = sources.texts(record, _KEYS, where)
    tree = sources.check_python(prompt, "prompt", where)
    if entry_point not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
        raise UserError(f"{where}: 'prompt' defines no function {entry_point!r}, its 'entry_point'; mend the row")
    sources.check_python(prompt + solution, "canonical_solution", where)
    sources.check_python(test, "test", where)
    return {
        "id": task_id,
        "question": _QUESTION.format(prompt.strip("\n")),
        "answer": prompt + solution,
        "entry_point": entry_point,
        "test": f"{test}\n\ncheck({entry_point})\n",
        # The tests of 32, 38 and 50 lean on the prompt's helper functions.
        "prelude": prompt,
        "completion_prefix": prompt,
    }
