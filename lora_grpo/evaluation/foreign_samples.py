"""Samples that other tools wrote, with what those tools said of them: the kit's rules held against theirs.

Two shapes are known, both of GSM8K, and told by a file's first line:

- lm-evaluation-harness's `--log_samples` of `gsm8k` and its variants: a line for each document and filter, with `doc`,
  `resps`, `filter` and `exact_match`.
- The solutions that GSM8K's authors publish beside the data set: a line for each question, with an object for each of
  their models that has `solution` and `is_correct`.

A row is found by its question's text, as a run may have been limited, shuffled or made on a part of the data.

Source: https://github.com/EleutherAI/lm-evaluation-harness (`lm_eval/evaluator.py`, version 0.4.13) and
https://github.com/openai/grade-school-math (`grade_school_math/data/example_model_solutions.jsonl`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.tasks import Row

Line = tuple[str, Any]
Sample = dict[str, Any]

_LM_EVAL_KEYS: dict[str, type | tuple[type, ...]] = {
    "doc_id": int,
    "doc": dict,
    "resps": list,
    "filter": str,
    "exact_match": (int, float),
}
_LM_EVAL_LINE = "a line of lm-eval's --log_samples with 'doc_id', 'doc', 'resps', 'filter' and 'exact_match'"
_AUTHORS_LINE = "a line with 'question' and, for each model, an object with 'solution' and 'is_correct'"

_OF_FIRST_RESPONSE = ("strict-match", "flexible-extract", "score-first", "get-answer")
"""lm-eval's filters that end in take_first: of several responses they judge the first, unlike `maj@8`."""
_RULES = {"flexible-extract": "flexible", "strict-match": "strict", "label": "robust"}
_MAX_DISAGREEMENTS = 20


def translate(lines: Sequence[Line], rows: Mapping[str, Row]) -> list[tuple[str, Sample]] | None:
    """Return the samples of another tool's file as the kit's.

    Args:
        lines: each line's place, "file:line", and its value.
        rows: GSM8K's rows by id.

    Returns:
        A place and a sample for each response: `task_id` (a key of `rows`), `completion`, and `labels` (lm-eval's
        verdict of each filter) or `model` and `label` (GSM8K's authors). None where the first line has neither shape.

    Raises:
        UserError: a line is malformed or of another shape than the first, or its question is not one of the rows'.
    """
    first = lines[0][1] if lines else None
    if not isinstance(first, dict) or "completion" in first:
        return None
    if len(first.keys() & _LM_EVAL_KEYS.keys()) > 1:
        return _lm_eval(lines, _ids(rows))
    if "question" in first and any(isinstance(value, dict) and "is_correct" in value for value in first.values()):
        return _authors(lines, _ids(rows))
    return None


def agreement(results: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Count how often the kit's rules say what the other tool said.

    Args:
        results: samples of `translate`, each with the verdicts `strict`, `flexible` and `robust`.

    Returns:
        For each model ("all" where none is named) and each label: `rule`, the kit's rule beside it; `samples` that have
        the label; how many of them `passed` by that rule, how many were `labelled_correct`, on how many both `agree`,
        and the task_ids of the first `disagreements`. lm-eval's `flexible-extract` stands beside `flexible`, the
        authors' `label` beside `robust`. `strict-match` stands beside `strict`, but `agree` is None: it takes the first
        `#### number` wherever it is, which is another rule. A filter that no rule is like has None for `passed` too.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        labels = {"label": result["label"]} if "label" in result else result.get("labels", {})
        for name, label in labels.items():
            counts = found.setdefault(result.get("model", "all"), {}).setdefault(name, _no_counts(_RULES.get(name)))
            counts["samples"] += 1
            counts["labelled_correct"] += label
            if counts["rule"] is not None:
                counts["passed"] += result[counts["rule"]]
            if counts["agree"] is None:
                continue
            if result[counts["rule"]] == label:
                counts["agree"] += 1
            elif len(counts["disagreements"]) < _MAX_DISAGREEMENTS:
                counts["disagreements"].append(result["task_id"])
    return found


def _no_counts(rule: str | None) -> dict[str, Any]:
    return {
        "rule": rule,
        "samples": 0,
        "passed": None if rule is None else 0,
        "labelled_correct": 0,
        "agree": None if rule in (None, "strict") else 0,
        "disagreements": [],
    }


# The row of a question


def _ids(rows: Mapping[str, Row]) -> dict[str, list[str]]:
    """Return the ids of the rows that ask each question."""
    found: dict[str, list[str]] = {}
    for row_id, row in rows.items():
        found.setdefault(_spaced(row["question"]), []).append(row_id)
    return found


def _spaced(question: str) -> str:
    """Make one space of every run of white space: copies of the data set differ in them."""
    return " ".join(question.split())


def _find(question: Any, ids: Mapping[str, Sequence[str]], where: str, expected: str) -> str:
    """Return the id of the row that asks this question."""
    if not isinstance(question, str):
        got = "is missing" if question is None else f"is {question!r:.60}"
        raise UserError(f"{where}: 'question' {got}; expected {expected}")
    found = ids.get(_spaced(question), ())
    if not found:
        raise UserError(
            f"{where}: no row of the data asks {question!r:.80}; pass the data that it comes from by --data"
        )
    if len(found) > 1:
        raise UserError(f"{where}: rows {found[0]} and {found[1]} both ask {question!r:.80}; leave one out of the data")
    return found[0]


# lm-eval


def _lm_eval(lines: Sequence[Line], ids: Mapping[str, Sequence[str]]) -> list[tuple[str, Sample]]:
    """Make one sample of each response: lm-eval writes a document's responses again for every filter."""
    documents: dict[int, tuple[str, str, list[str]]] = {}
    labels: dict[int, dict[str, bool]] = {}
    for where, value in lines:
        _check_lm_eval(value, where)
        name, responses = value["doc_id"], _responses(value["resps"], where)
        row_id = _find(value["doc"].get("question"), ids, where, "it in 'doc', as lm-eval's gsm8k has it")
        place, *found = documents.setdefault(name, (where, row_id, responses))
        if found != [row_id, responses]:
            raise UserError(
                f"{where}: document {name} has other responses or another question than at {place}; "
                "the file holds two runs, give one of them"
            )
        if value["filter"] in labels.setdefault(name, {}):
            raise UserError(
                f"{where}: document {name} has the filter {value['filter']!r} twice; "
                "the file holds two runs, give one of them"
            )
        labels[name][value["filter"]] = value["exact_match"] == 1
    samples = []
    for name, (place, row_id, responses) in documents.items():
        for number, response in enumerate(responses):
            known = {
                filter_name: label
                for filter_name, label in labels[name].items()
                if len(responses) == 1 or (number == 0 and filter_name in _OF_FIRST_RESPONSE)
            }
            samples.append((place, {"task_id": row_id, "completion": response, "labels": known}))
    return samples


def _check_lm_eval(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise UserError(f"{where}: got {type(value).__name__}; expected {_LM_EVAL_LINE}")
    for key, kinds in _LM_EVAL_KEYS.items():
        if not isinstance(value.get(key), kinds):
            got = f"is {value[key]!r:.60}" if key in value else "is missing"
            raise UserError(f"{where}: {key!r} {got}; expected {_LM_EVAL_LINE}")
    if value["exact_match"] not in (0, 1):
        raise UserError(f"{where}: 'exact_match' is {value['exact_match']!r:.60}; expected 0.0 or 1.0, as gsm8k has it")


def _responses(nested: Sequence[Any], where: str) -> list[str]:
    """Return a document's responses: lm-eval nests them in a list of requests, of which gsm8k makes one."""
    responses = nested[0] if len(nested) == 1 else None
    if not isinstance(responses, list) or not responses or not all(isinstance(text, str) for text in responses):
        raise UserError(f"{where}: 'resps' is {nested!r:.60}; expected one list of one text or more, as gsm8k has it")
    return responses


# GSM8K's authors


def _authors(lines: Sequence[Line], ids: Mapping[str, Sequence[str]]) -> list[tuple[str, Sample]]:
    samples = []
    for where, value in lines:
        if not isinstance(value, dict):
            raise UserError(f"{where}: got {type(value).__name__}; expected {_AUTHORS_LINE}")
        row_id = _find(value.get("question"), ids, where, _AUTHORS_LINE)
        models = {key: solved for key, solved in value.items() if key not in ("question", "ground_truth")}
        if not models:
            raise UserError(f"{where}: no model's solution; expected {_AUTHORS_LINE}")
        for model, solved in models.items():
            text, label = (
                (solved.get("solution"), solved.get("is_correct")) if isinstance(solved, dict) else (None, None)
            )
            if not isinstance(text, str) or not isinstance(label, bool):
                raise UserError(f"{where}: {model!r} is {solved!r:.60}; expected {_AUTHORS_LINE}")
            samples.append((where, {"task_id": row_id, "completion": _marked(text), "model": model, "label": label}))
    return samples


def _marked(solution: str) -> str:
    """Write the solution's last line `A: 18` as the data set writes it, `#### 18`.

    The kit's rules look for an answer marker, and `A:` is none: it stands in any dialogue. Nothing else is changed, so
    that a solution cut off before its last line has no answer here either.
    """
    start = solution.rstrip().rfind("\n") + 1
    return f"{solution[:start]}#### {solution[start + 3 :]}" if solution[start:].startswith("A: ") else solution
