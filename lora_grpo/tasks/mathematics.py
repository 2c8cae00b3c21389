"""Mathematics: competition problems whose answers are numbers, expressions, sets or intervals, graded by math-verify.

`math` trains on the training set of MATH and is evaluated on MATH-500. `math500`, `aime24` and `aime25` are benchmarks.
Other rows, from `--data.train` and `--data.eval`, have a `question` or `problem`, and an `answer` in LaTeX or a
`solution` that ends in `\\boxed{}`.

The answer is read as in GSM8K: after the model's thoughts, from `<answer>`, `\\boxed{}` or `####`, on the last line
that has one. An unclosed marker is not an answer. All of the answer must be equal to the reference: math-verify reads
two values as a set. A comparison may take five seconds, in a process of its own.

Sources: https://github.com/huggingface/Math-Verify, version 0.9.0; Hendrycks et al. 2021 (arXiv:2103.03874) for MATH;
Lightman et al. 2023 (arXiv:2305.20050) for MATH-500.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.files import json_files
from lora_grpo.grading import Row, Verdict, find_answers
from lora_grpo.prompts import DEFAULT_STYLE, own_prompt, thoughts, write_completion
from lora_grpo.tasks import sources
from lora_grpo.tasks.columns import own_columns, row_ids, with_record
from lora_grpo.workers import TooSlow, Worker

COLUMNS = ("question", "answer")
_DATASETS = {
    "math": {"train": "DigitalLearningGmbH/MATH-lighteval", "eval": "HuggingFaceH4/MATH-500"},
    "math500": {"eval": "HuggingFaceH4/MATH-500"},
    "aime24": {"eval": "HuggingFaceH4/aime_2024@train"},
    "aime25": {"eval": "math-ai/aime25"},
}
_LONGEST = 500
"""Characters of an answer that is graded."""
_compare = Worker("lora_grpo.tasks.mathematics:is_equal", seconds=5.0, imports=["math_verify"])


def read(name: str) -> Any:
    """Return one of the tasks of this module."""
    return SimpleNamespace(load=functools.partial(load, name), check=check, gold=gold, COLUMNS=COLUMNS)


def load(name: str, split: str, source: str | None = None, columns: Mapping[str, str] | None = None) -> list[Row]:
    """Return the rows of a split of a task; see `Task.load`."""
    dataset = source or _DATASETS[name].get(split)
    if dataset is None:
        raise UserError(f"{name} is a benchmark without training rows; pass --data.train, or --task math")
    records = sources.read(dataset, split, (), columns)
    prefix = dataset if sources.is_on_hub(dataset) else json_files.stem(Path(dataset))
    # The rows of a benchmark are numbered, whatever ids its dataset has.
    names = row_ids([record for _, record in records] if source else [{}] * len(records), prefix)
    rows = []
    for row_id, (where, record) in zip(names, records, strict=True):
        row = {"question": record.get("problem"), "answer": record.get("solution"), **own_columns(record)}
        row |= {"id": row_id, **own_prompt(record, where)}
        if isinstance(row["answer"], int | float):
            row["answer"] = str(row["answer"])
        sources.texts(row, COLUMNS, where)
        _final_answer(row, where)
        rows.append(with_record(row, record, where))
    return rows


def check(completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade one completion, which may be any string, against its row."""
    text = thoughts.answer_of(completion)
    if text is None:
        return Verdict(False, thoughts.UNFINISHED)
    found = find_answers(text)
    if found is None:
        return Verdict(False, "unclosed_answer")
    answer = ", ".join(map(_unwrapped, found))
    if not answer:
        return Verdict(False, "no_answer" if completion.strip() else "empty")
    if len(answer) > _LONGEST:
        return Verdict(False, "unreadable_answer", answer)
    try:
        passed = _compare(_final_answer(row), answer)
    except TooSlow:
        return Verdict(False, "timeout", answer)
    except RuntimeError as error:
        return Verdict(False, "unreadable_answer", answer, detail=str(error))
    return Verdict(passed, "correct" if passed else "wrong_answer", answer)


def gold(row: Mapping[str, Any]) -> str:
    """Return the row's solution, if it has one, and its answer in its `prompt_style`."""
    style, answer = row.get("prompt_style") or DEFAULT_STYLE, _final_answer(row)
    solution = str(row.get("solution") or (row["answer"] if row["answer"] != answer else "")).strip()
    if style == "boxed" and find_answers(solution) == [answer]:
        return solution
    return write_completion(solution or f"The answer is ${answer}$.", answer, style)


def is_equal(reference: str, answer: str) -> bool:
    """Return whether two answers in LaTeX are mathematically equal. Called in a `Worker`."""
    import logging

    import math_verify

    logging.disable()  # it warns that no time limit is set, which is that of the worker
    form = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
    texts = (f"\\boxed{{{each}}}" for each in (reference, answer))
    expected, found = (math_verify.parse(text, form, parsing_timeout=None) for text in texts)
    return bool(math_verify.verify(expected, found, timeout_seconds=None))


def _unwrapped(answer: str) -> str:
    """Return an answer without the dollar signs and the box in which it may be."""
    answer = answer.strip().strip("$").strip()
    inner = find_answers(answer) if answer.startswith("\\boxed") else None
    return inner[0] if inner and len(inner) == 1 and answer.endswith("}") else answer


def _final_answer(row: Mapping[str, Any], where: str | None = None) -> str:
    """Return the answer of a row, which may be the end of a worked solution."""
    text = thoughts.answer_of(row["answer"])
    found = None if text is None else find_answers(text)
    answer = row["answer"].strip() if found == [] else ", ".join(map(_unwrapped, found or ()))
    if not answer:
        where = where or f"row {row.get('id', '?')}"
        raise UserError(f"{where}: no answer in {row['answer'][-60:]!r}; expected one, or a solution with \\boxed{{}}")
    return answer.strip("$") if found == [] else answer
