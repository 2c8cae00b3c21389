"""Grade files of samples in the format of HumanEval's harness: one JSON object per line, `task_id` and `completion`.

The meaning of `completion` depends on the task:

- humaneval, humaneval-plus: the text after the prompt. The program is prompt + completion, then the tests, as
  in the harness. Nothing is extracted or removed, so a code fence or prose is a syntax error.
- `solution` in place of `completion`, as in EvalPlus: the whole program, for humaneval too.
- mbpp, mbpp-plus, starter-code: the whole program. MBPP's `task_id` is `mbpp/11`, `Mbpp/11` or 11.
- gsm8k, starter: the model's answer. GSM8K's `task_id` is `gsm8k/test/N`, where N is the row index, starting at 0. The
  `robust` rule determines whether a sample passes. The result contains all rules.

Source: https://github.com/openai/human-eval (`evaluation.py`, `execution.py`).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_grpo import console, sandbox
from lora_grpo.data import columns_of, fingerprint, load_split
from lora_grpo.errors import UserError
from lora_grpo.evaluation.options import EvaluateOptions, EvaluationSettings
from lora_grpo.evaluation.protocol import Protocol, make_protocol
from lora_grpo.evaluation.report import Graded
from lora_grpo.evaluation.results import (
    GRADES,
    Request,
    Result,
    append_batches,
    environment_of,
    is_greedy,
    problem_id,
    start,
    verdict_entries,
)
from lora_grpo.files import atomic, json_files
from lora_grpo.grading import Row, Verdict, programs
from lora_grpo.tasks import CODE_TASKS, MBPP, grade_all, task_sha256, task_title

_CHUNK = 256
"""Number of samples between two writes. A killed evaluation repeats at most this many."""
_NOT_COPIED = (*GRADES, "messages", "failure")
"""Entries of a line that its result does not keep, because other tools may use them with another meaning."""
_EXPECTED = "one JSON object with 'task_id' and 'completion' a line"


@dataclass(frozen=True)
class Sample:
    """One line of a samples file."""

    line: Mapping[str, Any]
    """As it was read, with the text to grade as `completion`."""
    row: Row
    """The row that it answers."""

    @property
    def completion(self) -> str:
        return str(self.line["completion"])


@dataclass(frozen=True)
class SampleFile:
    """A validated file of samples to grade."""

    label: str
    """The name of the file in reports."""
    task: str
    samples: list[Sample]
    request: Request
    protocol: Protocol
    limits: sandbox.Settings
    """The limits of programs, if the task grades programs."""

    @property
    def problem_ids(self) -> set[str]:
        return {problem_id(sample.row) for sample in self.samples}

    @property
    def min_samples(self) -> int:
        """The smallest number of samples of a problem, without greedy samples; 1 if all samples are greedy."""
        counts = Counter(sample.row["id"] for sample in self.samples if not is_greedy(sample.line))
        return min(counts.values(), default=1)

    def grade(self, path: Path) -> Graded:
        """Grade every sample that has no result in a file yet, and append the results to it.

        A killed evaluation resumes after the last complete chunk, because results are in the order of the samples.
        """
        results = self._finished(path)
        environment = environment_of(path)
        if environment is None or len(results) < len(self.samples):
            environment = {"isolation": self._start_sandbox()}
            start(path, self.request, environment)
            atomic.write_text(path, json_files.dump_lines(results))
            batches = self._grade_chunks(first=len(results))
            results = append_batches(path, results, batches, len(self.samples), f"grading {self.task}")

        # The results file has the ids of the other tool. A report compares problems by their ids in this package.
        results_for_report = []
        for sample, result in zip(self.samples, results, strict=True):
            results_for_report.append({**result, "task_id": problem_id(sample.row)})
        protocol = self.protocol.model_copy(update={"sandbox": environment.get("isolation")})
        return Graded(self.label, results_for_report, self.request, protocol)

    def _finished(self, path: Path) -> list[Result]:
        """Return the results that a file already has, which must be those of the first samples."""
        results = json_files.read_finished_lines(path, passed=bool, status=str)
        graded = [(result.get("task_id"), result.get("completion")) for result in results]
        expected = [(sample.line["task_id"], sample.completion) for sample in self.samples[: len(results)]]
        if graded != expected:
            raise UserError(f"{path} does not fit the samples; delete it and run the command again")
        return results

    def _start_sandbox(self) -> str | None:
        """Start the sandbox if programs are graded, check the problems' tests, and return how programs are isolated."""
        if self.task not in CODE_TASKS:
            return None
        isolation = sandbox.start(self.limits)
        rows_by_id = {sample.row["id"]: sample.row for sample in self.samples}
        programs.run_references(list(rows_by_id.values()))
        return isolation

    def _grade_chunks(self, first: int) -> Iterator[list[Result]]:
        """Yield the results of the samples from `first` on, a chunk at a time."""
        for start_of_chunk in range(first, len(self.samples), _CHUNK):
            yield _grade_chunk(self.task, self.samples[start_of_chunk : start_of_chunk + _CHUNK])


def read_samples(path: Path, label: str, options: EvaluateOptions, settings: EvaluationSettings) -> SampleFile:
    """Read a samples file, which may be gzipped, and the rows of its task."""
    task = settings.task
    data = settings.data
    if task == "mbpp":  # a file may have samples of all splits
        columns = columns_of(data, "eval")
        rows = MBPP().load_all_splits(data.eval, columns)
    else:
        rows = load_split(data, "eval")

    # What the verdicts depend on, beside samples and rows.
    grading: dict[str, Any] = {}
    if task in CODE_TASKS:
        grading = asdict(options.sandbox)
        del grading["workers"]  # the number of workers changes no verdict
    else:
        usual_style = "hashes" if task == "gsm8k" else "xml"
        grading["style"] = options.style or usual_style
        rows = [{**row, "prompt_style": grading["style"]} for row in rows]

    samples = _read_lines(path, task, rows)
    data_sha256 = fingerprint(rows)
    request = {
        "task": task_title(task),
        "task_sha256": task_sha256(task),
        "samples_sha256": atomic.sha256(path),
        "data_sha256": data_sha256,
        **grading,
    }
    protocol = make_protocol(data, None, len(rows), settings.seed, data_sha256=data_sha256)
    return SampleFile(label, task, samples, request, protocol, options.sandbox)


def _read_lines(path: Path, task: str, rows: Sequence[Row]) -> list[Sample]:
    """Return the lines of a samples file, each with the row that it answers."""
    rows_by_id = {str(row["id"]): row for row in rows}
    if task == "gsm8k":
        rows_by_id |= {f"gsm8k/test/{index}": row for index, row in enumerate(rows)}
    samples = []
    for where, line in json_files.read_lines(path, _EXPECTED):
        samples.append(_read_line(where, line, task, rows_by_id, num_rows=len(rows)))

    num_fenced = sum(re.search("^```", sample.completion, re.MULTILINE) is not None for sample in samples)
    if task in CODE_TASKS and num_fenced:
        console.note(f"note: {num_fenced} of {len(samples)} completions have a code fence (```), a syntax error")
    return samples


def _read_line(where: str, line: Any, task: str, rows_by_id: Mapping[str, Row], num_rows: int) -> Sample:
    """Return one line of a samples file with the row that it answers.

    Args:
        where: file and line number, for error messages.
    """
    text = None
    is_whole_program = False
    if isinstance(line, dict):
        text = line.get("completion")
        if "completion" not in line and task in CODE_TASKS:  # EvalPlus
            text = line.get("solution")
            is_whole_program = True
    if not isinstance(text, str) or "task_id" not in line:
        raise UserError(f"{where}: expected {_EXPECTED}, got {json.dumps(line):.100}")

    # The row with this id, as other tools may spell it.
    name = str(line["task_id"])
    if task in ("mbpp", "mbpp-plus"):
        name = f"mbpp/{name.lower().removeprefix('mbpp/')}"
    if name not in rows_by_id:
        raise UserError(f"{where}: unknown task_id {name!r}; the data has {num_rows}, such as {[*rows_by_id][-1]!r}")
    row = rows_by_id[name]
    if is_whole_program:
        row = {**row, "completion_prefix": ""}
    return Sample({**line, "completion": text}, row)


def _grade_chunk(task: str, samples: Sequence[Sample]) -> list[Result]:
    rows = [sample.row for sample in samples]
    if task in CODE_TASKS:
        verdicts = _run_programs(samples)
    else:
        verdicts = grade_all(task, [sample.completion for sample in samples], rows)
    results = []
    for sample, verdict in zip(samples, verdicts, strict=True):
        result = dict(sample.line)
        for key in _NOT_COPIED:
            result.pop(key, None)
        results.append({**result, **verdict_entries(verdict)})
    return results


def _run_programs(samples: Sequence[Sample]) -> list[Verdict]:
    """Run the programs of samples exactly as they are: nothing is extracted or removed."""
    sources = [sample.row.get("completion_prefix", "") + sample.completion for sample in samples]
    verdicts = []
    for verdict in programs.run_sources(sources, [sample.row for sample in samples]):
        if verdict:  # it is None only for a program that is None
            verdicts.append(Verdict(verdict.passed, verdict.status, detail=verdict.message or None))
    return verdicts
