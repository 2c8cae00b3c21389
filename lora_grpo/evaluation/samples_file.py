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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_grpo import console, sandbox
from lora_grpo.data import columns_of, fingerprint, load_split
from lora_grpo.errors import UserError
from lora_grpo.evaluation.options import EvaluateOptions, EvaluationSettings
from lora_grpo.evaluation.report import Graded, Protocol, make_protocol
from lora_grpo.evaluation.results import GRADES, Request, Result, append, environment_of, grades, start, task_id
from lora_grpo.files import atomic, json_files
from lora_grpo.grading import Row, Verdict, programs
from lora_grpo.tasks import CODE_TASKS, MBPP, grade_all, task_sha256, task_title

_CHUNK = 256
"""Number of samples between two writes. A killed evaluation repeats at most this many."""

Sample = tuple[Mapping[str, Any], Row]
"""One line of a samples file, and the row that it answers."""


@dataclass(frozen=True)
class SampleFile:
    """A validated file of samples to grade."""

    label: str
    task: str
    samples: list[Sample]
    request: Request
    protocol: Protocol
    limits: sandbox.Settings

    @property
    def tasks(self) -> set[str]:
        return {task_id(row) for _, row in self.samples}

    @property
    def min_samples(self) -> int:
        """The smallest number of samples of a task that has samples. Greedy ones beside them do not count."""
        counts = Counter(row["id"] for line, row in self.samples if line.get("sample_index") != "greedy")
        return min(counts.values(), default=1)

    def grade(self, path: Path) -> Graded:
        """Grade every sample that has no result in a file yet, and append the results to it.

        A killed evaluation resumes after the last complete chunk, because results are in the order of the samples.
        """
        results = json_files.read_finished_lines(path, passed=bool, status=str)
        done = [(result.get("task_id"), result.get("completion")) for result in results]
        if done != [(line["task_id"], line["completion"]) for line, _ in self.samples[: len(done)]]:
            raise UserError(f"{path} does not fit the samples; delete it and run the command again")
        environment = environment_of(path)
        if environment is None or len(results) < len(self.samples):
            environment = {"isolation": sandbox.start(self.limits) if self.task in CODE_TASKS else None}
            if self.task in CODE_TASKS:
                programs.run_references(list({row["id"]: row for _, row in self.samples}.values()))
            start(path, self.request, environment)
            atomic.write_text(path, json_files.dump_lines(results))
            chunks = range(len(results), len(self.samples), _CHUNK)
            new = (_grade_chunk(self.task, self.samples[first : first + _CHUNK]) for first in chunks)
            results = append(path, results, new, len(self.samples), f"grading {self.task}")
        results = [{**result, "task_id": task_id(row)} for (_, row), result in zip(self.samples, results, strict=True)]
        protocol = self.protocol.model_copy(update={"sandbox": environment.get("isolation")})
        return Graded(self.label, results, self.request, protocol)


def read_samples(path: Path, label: str, options: EvaluateOptions, settings: EvaluationSettings) -> SampleFile:
    """Read a samples file, which may be gzipped, and the rows of its task."""
    task, data = settings.task, settings.data
    style = options.style or ("hashes" if task == "gsm8k" else "xml")
    all_splits = task == "mbpp"
    rows = MBPP().load_all_splits(data.eval, columns_of(data, "eval")) if all_splits else load_split(data, "eval")
    if task in CODE_TASKS:
        graded_with = {name: value for name, value in asdict(options.sandbox).items() if name != "workers"}
    else:
        graded_with = {"style": style}
        rows = [{**row, "prompt_style": style} for row in rows]
    samples = _read_lines(path, task, rows)
    data_sha256 = fingerprint(rows)
    request = {
        "task": task_title(task),
        "task_sha256": task_sha256(task),
        "samples_sha256": atomic.sha256(path),
        "data_sha256": data_sha256,
        **graded_with,
    }
    protocol = make_protocol(data, {"eval": {"sha256": data_sha256}}, None, len(rows), settings.seed)
    return SampleFile(label, task, samples, request, protocol, options.sandbox)


def _read_lines(path: Path, task: str, rows: Sequence[Row]) -> list[Sample]:
    """Return the lines of a samples file, each with the row that it answers."""
    by_id = {str(row["id"]): row for row in rows}
    if task == "gsm8k":
        by_id |= {f"gsm8k/test/{index}": row for index, row in enumerate(rows)}
    expected = "one JSON object with 'task_id' and 'completion' a line"
    samples: list[Sample] = []
    for where, line in json_files.read_lines(path, expected):
        keys = line.keys() if isinstance(line, dict) else {}
        is_whole = "completion" not in keys and task in CODE_TASKS
        text = line.get("solution" if is_whole else "completion") if keys else None
        if not isinstance(text, str) or "task_id" not in keys:
            raise UserError(f"{where}: expected {expected}, got {json.dumps(line):.100}")
        name = str(line["task_id"])
        if task in ("mbpp", "mbpp-plus"):
            name = f"mbpp/{name.lower().removeprefix('mbpp/')}"
        if name not in by_id:
            raise UserError(f"{where}: unknown task_id {name!r}; the data has {len(rows)}, such as {[*by_id][-1]!r}")
        row = {**by_id[name], "completion_prefix": ""} if is_whole else by_id[name]
        samples.append(({**line, "completion": text}, row))
    fenced = sum(re.search("^```", line["completion"], re.MULTILINE) is not None for line, _ in samples)
    if task in CODE_TASKS and fenced:
        console.note(f"note: {fenced} of {len(samples)} completions have a code fence (```), a syntax error")
    return samples


def _grade_chunk(task: str, samples: Sequence[Sample]) -> list[Result]:
    if task in CODE_TASKS:
        sources = [row.get("completion_prefix", "") + line["completion"] for line, row in samples]
        ran = [verdict for verdict in programs.run_sources(sources, [row for _, row in samples]) if verdict]
        verdicts = [Verdict(verdict.passed, verdict.status, detail=verdict.message or None) for verdict in ran]
    else:
        verdicts = grade_all(task, [line["completion"] for line, _ in samples], [row for _, row in samples])
    # Keys of the line are kept, except for those that other tools may use with another meaning.
    lines = [{key: value for key, value in line.items() if key not in (*GRADES, "messages")} for line, _ in samples]
    return [{**line, **grades(verdict)} for line, verdict in zip(lines, verdicts, strict=True)]
