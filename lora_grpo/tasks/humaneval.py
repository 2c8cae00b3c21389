"""HumanEval and HumanEval+: 164 Python functions to complete, graded with unit tests, or a file in the same format.

Source: Chen et al. 2021 (arXiv:2107.03374), https://github.com/openai/human-eval; Liu et al. 2023 (arXiv:2305.01210),
https://github.com/evalplus/evalplus. The question's wording follows https://github.com/deepseek-ai/DeepSeek-Coder
(`Evaluation/HumanEval/eval_instruct.py`).
"""

from collections.abc import Mapping

from lora_grpo.grading import Row
from lora_grpo.tasks import sources
from lora_grpo.tasks.columns import with_loaded_columns
from lora_grpo.tasks.evalplus_columns import plus_columns
from lora_grpo.tasks.task import ProgramTask

_PROBLEM_COLUMNS = ("task_id", "prompt", "entry_point", "canonical_solution")
_QUESTION = (
    "Please continue to complete the function. You are not allowed to modify the given code and do the completion "
    "only. Please return all completed function in a codeblock. Here is the given code to do completion:\n"
    "```python\n{}\n```"
)


class HumanEval(ProgramTask):
    """The functions with their original tests."""

    COLUMNS = (*_PROBLEM_COLUMNS, "test")
    HUB_DATASET = "openai/openai_humaneval"

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        """Return all rows for either split, because the dataset has a single one; see `Task.load`."""
        source = source or self.HUB_DATASET
        rows = []
        for record in sources.read(source, "test", self.COLUMNS, columns):
            row = _row_without_tests(record)
            [test] = sources.texts(record.columns, ["test"], record.where)
            row["test"] = f"{test}\n\ncheck({row['entry_point']})\n"
            # The tests of 32, 38 and 50 use the prompt's helper functions.
            row["prelude"] = row["completion_prefix"]
            rows.append(with_loaded_columns(row, record.columns, record.where))
        return sources.unique(rows, source)


class HumanEvalPlus(ProgramTask):
    """The functions with the tests of EvalPlus."""

    HUB_DATASET = "evalplus/humanevalplus"

    def load(self, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
        """Return all rows for either split, from a file of EvalPlus's release or from the Hub."""
        source = source or self.HUB_DATASET
        rows = []
        for record in sources.read(source, "test", _PROBLEM_COLUMNS):
            row = _row_without_tests(record)
            row |= plus_columns(record, row["answer"], row["entry_point"])
            rows.append(with_loaded_columns(row, record.columns, record.where))
        return sources.unique(rows, source)


def make_task(name: str) -> ProgramTask:
    """Return the task `humaneval` or `humaneval-plus`."""
    return HumanEval() if name == "humaneval" else HumanEvalPlus()


def _row_without_tests(record: sources.Record) -> Row:
    task_id, prompt, entry_point, solution = sources.texts(record.columns, _PROBLEM_COLUMNS, record.where)
    return {
        "id": task_id,
        "question": _QUESTION.format(prompt.strip("\n")),
        "answer": prompt + solution,
        "entry_point": entry_point,
        "completion_prefix": prompt,
    }
