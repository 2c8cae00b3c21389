"""Grade files of samples in the format of HumanEval's harness: one JSON object per line, `task_id` and `completion`.

The meaning of `completion` depends on the task:

- humaneval: the text after the prompt. The program is prompt + completion, then the tests and `check(entry_point)`, as
  in the harness. Nothing is extracted or removed, so a code fence or prose is a syntax error.
- mbpp, starter-code: the whole program. MBPP's `task_id` is `mbpp/11`, `Mbpp/11` or 11.
- gsm8k, starter: the model's answer. GSM8K's `task_id` is `gsm8k/test/N`, where N is the row index, starting at 0. The
  `robust` rule determines whether a sample passes. The result contains all rules.

Source: https://github.com/openai/human-eval (`evaluation.py`, `execution.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_grpo import sandbox
from lora_grpo.errors import UserError
from lora_grpo.evaluation.results import Result, outcome
from lora_grpo.evaluation.results import task_id as harness_id
from lora_grpo.files import atomic, json_files
from lora_grpo.progress import Progress
from lora_grpo.tasks import CODE_TASKS, Row, Verdict, code_grading, fingerprint, get_task, mbpp

_CHUNK = 256
"""Number of samples between two writes. A killed evaluation repeats at most this many."""


@dataclass(frozen=True)
class Sample:
    """One line of a samples file."""

    line: Mapping[str, Any]
    """The whole line. Results keep its keys."""
    row: Row

    @property
    def completion(self) -> str:
        """The model's text."""
        return str(self.line["completion"])


@dataclass(frozen=True)
class SampleFile:
    """A validated samples file, and the rows that its samples answer."""

    task: str
    samples: list[Sample]
    tasks_in_data: int
    identity: dict[str, Any]
    """Everything that determines the verdicts."""

    @property
    def fewest(self) -> int:
        """The smallest number of samples of a task that has samples."""
        return min(Counter(sample.row["id"] for sample in self.samples).values())

    def results_by_task(self, results: Sequence[Result]) -> list[Result]:
        """Return the results with a normalized task_id."""
        pairs = zip(self.samples, results, strict=True)
        return [{**result, "task_id": harness_id(sample.row)} for sample, result in pairs]


def read(path: Path, task: str, data: str | None, style: str | None, limits: sandbox.Settings) -> SampleFile:
    """Read a samples file and the rows of its task.

    Args:
        path: JSON Lines, optionally gzipped.
        task: the task that the samples answer.
        data: rows of the task: a file, a Hub dataset, or None for the task's own data.
        style: answer format that the strict rule expects. None is `hashes` for GSM8K (the format of the dataset), else
            `xml`.
        limits: limits of the programs that are run.

    Raises:
        UserError: a file is missing, empty or malformed, a task_id is unknown, or the tests of a row are invalid.
    """
    style = style or ("hashes" if task == "gsm8k" else "xml")
    rows = _rows(task, data, style)
    samples = _samples(path, task, rows)
    identity: dict[str, Any] = {
        "task": task,
        "samples_sha256": atomic.sha256(path),
        "data_sha256": fingerprint(list(rows.values())),
    }
    if task in CODE_TASKS:
        code_grading.check_tests({sample.row["id"]: sample.row for sample in samples}.values())
        identity |= {name: value for name, value in asdict(limits).items() if name != "workers"}
    else:
        identity["style"] = style
    return SampleFile(task, samples, len(rows), identity)


def grade(file: SampleFile, target: Path) -> list[Result]:
    """Grade every sample that has no result yet, and return all results.

    Args:
        file: from `read`.
        target: the results file. A killed evaluation resumes after the last complete chunk.

    Raises:
        RunError: the sandbox or the tests of a row cannot be run.
        UserError: the results file does not match the samples.
    """
    results: list[Result] = json_files.read_finished_lines(target)
    for sample, result in zip(file.samples, results, strict=False):
        same = isinstance(result, dict) and "passed" in result
        if not same or any(result.get(key) != sample.line[key] for key in ("task_id", "completion")):
            raise UserError(f"{target} does not fit the samples; delete it and run the command again")
    json_files.keep_lines(target, len(results))
    if len(results) == len(file.samples):
        return results
    if results:
        print(f"{len(results)} of {len(file.samples)} samples are done", file=sys.stderr)
    passed = sum(result["passed"] for result in results)
    progress = Progress(len(file.samples), f"grading {file.task}")
    with contextlib.closing(progress), target.open("a", encoding="utf-8") as stream:
        for start in range(len(results), len(file.samples), _CHUNK):
            new = _grade_chunk(file.task, file.samples[start : start + _CHUNK])
            json_files.append_lines(stream, new)
            results += new
            passed += sum(result["passed"] for result in new)
            progress.show(len(results), f"{passed / len(results):.1%} pass")
    return results


def _rows(task: str, data: str | None, style: str) -> dict[str, Row]:
    """Return the rows by the task_id used in samples files."""
    if task == "mbpp":
        return {row["id"]: row for row in mbpp.read(data)}
    loaded = get_task(task).load("eval", data, None, 0)
    if task == "gsm8k":
        return {f"gsm8k/test/{i}": {**row, "prompt_style": style} for i, row in enumerate(loaded)}
    return {row["id"]: {**row, "prompt_style": style} if task == "starter" else row for row in loaded}


def _samples(path: Path, task: str, rows: Mapping[str, Row]) -> list[Sample]:
    by_id = {row["id"]: row for row in rows.values()} | dict(rows)
    samples = []
    for where, line in json_files.read_lines(path, "one JSON object with 'task_id' and 'completion' a line"):
        if not isinstance(line, dict):
            raise UserError(f"{where}: got {type(line).__name__}; expected an object with 'task_id' and 'completion'")
        for key, kinds in (("task_id", (str, int)), ("completion", str)):
            if not isinstance(line.get(key), kinds):
                got = f"is {line[key]!r:.60}" if key in line else "is missing"
                raise UserError(f"{where}: {key!r} {got}; expected a JSON object with 'task_id' and 'completion'")
        name = str(line["task_id"])
        if task == "mbpp":
            name = f"mbpp/{name[5:] if name[:5].lower() == 'mbpp/' else name}"
        if name not in by_id:
            raise UserError(
                f"{where}: unknown task_id {line['task_id']!r}; the data has {len(rows)}, such as {next(iter(rows))!r}"
            )
        samples.append(Sample(line, by_id[name]))
    return samples


def _grade_chunk(task: str, samples: Sequence[Sample]) -> list[Result]:
    if task not in CODE_TASKS:
        grade = get_task(task).grade
        return [{**sample.line, **outcome(grade(sample.completion, sample.row))} for sample in samples]
    sources = [sample.row.get("completion_prefix", "") + sample.completion for sample in samples]
    outcomes = code_grading.run_sources(sources, [sample.row for sample in samples])
    return [
        {**sample.line, **outcome(Verdict(verdict.passed, verdict.status, detail=verdict.message or None))}
        for sample, (_, verdict) in zip(samples, outcomes, strict=True)
        if verdict is not None
    ]
