"""Grades a file of samples in the format of HumanEval's own harness: one JSON a line, `task_id` and `completion`.

What a completion is:

- humaneval: the text after the prompt. The program is prompt + completion, then the tests and `check(entry_point)`, as
  in the harness: nothing is extracted and nothing cut, so a fence or a word of prose is a syntax error.
- mbpp: the whole program. `task_id` is `mbpp/11`, `Mbpp/11` or 11.
- gsm8k: the answer in words; `task_id` is `gsm8k/test/N`, N the row's number from 0. A sample passes by the `robust`
  rule; every rule is in its result.

DIR/results.jsonl holds the samples in their order with `passed`, `result` in the harness's words and `status` in the
sandbox's; DIR/report.json what they come to. A killed evaluation goes on after its last whole chunk, and one that is
finished answers again at once.

Source: https://github.com/openai/human-eval (`evaluation.py`, `execution.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lora_grpo import atomic, json_lines, passk, sandbox
from lora_grpo.data import fingerprint
from lora_grpo.errors import UserError
from lora_grpo.folder_lock import holding
from lora_grpo.progress import Progress
from lora_grpo.tasks import Row, gsm8k, humaneval, mbpp
from lora_grpo.tasks.code_grading import check_tests, run_sources

Result = dict[str, Any]
"""A sample with `passed`, `result` and `status`, and GSM8K's rules."""

_CHUNK = 256
"""Samples graded between two writes; a killed evaluation loses no more."""


@dataclass(frozen=True)
class Options:
    """Flags of `scripts/evaluate.py`."""

    task: Literal["humaneval", "mbpp", "gsm8k"]
    """What the samples answer."""
    samples: Path
    """JSON lines with `task_id` and `completion`; may be gzipped (.gz)."""
    output_dir: Path
    """Folder for results.jsonl and report.json."""
    data: str | None = None
    """The task's rows: a JSON-lines file, may be gzipped, or a Hub data set id; None takes the task's own on the Hub.
    """
    k: tuple[int, ...] = (1, 10, 100)
    """The k of pass@k; those are reported that every task has samples enough for."""
    style: Literal["hashes", "xml", "think"] = "hashes"
    """What GSM8K's strict rule looks for. `hashes` (a last line `#### 18`) is how the data set writes its answers, and
    what samples made elsewhere were most likely shown."""
    sandbox: sandbox.Settings = field(default_factory=sandbox.Settings)
    """How programs are run."""


@dataclass(frozen=True)
class Sample:
    """One line of the file of samples."""

    line: Mapping[str, Any]
    """The whole line; its keys are kept in the results."""
    row: Row

    @property
    def completion(self) -> str:
        """The model's text."""
        return str(self.line["completion"])


def evaluate_samples(options: Options) -> dict[str, Any]:
    """Grade every sample that is not graded yet, write results and report, and return the report.

    Raises:
        UserError: a file is missing, empty or malformed, a task_id is unknown, no k can be reported, the folder holds
            another evaluation, or programs cannot be run safely. Nothing has been written then.
        RunError: a row's tests cannot run, or the sandbox cannot.
    """
    if options.task != "gsm8k":
        sandbox.check_settings(options.sandbox)
    rows = _rows(options)
    samples = _read_samples(options, rows)
    _check_k(options.k, samples)
    if options.task != "gsm8k":
        check_tests({sample.row["id"]: sample.row for sample in samples}.values())
    request: dict[str, Any] = {
        "task": options.task,
        "samples_sha256": atomic.sha256(options.samples),
        "data_sha256": fingerprint(list(rows.values())),
    }
    if options.task == "gsm8k":
        request["style"] = options.style
    else:
        request |= {name: value for name, value in asdict(options.sandbox).items() if name != "workers"}
    finished = _finished(options.output_dir, request)  # a folder of something else is refused before it is touched
    with holding(options.output_dir):
        if finished is None:  # unless another process has come to its end meanwhile
            finished = _finished(options.output_dir, request)
        if finished is None:
            results, isolation = _grade(options, samples, request)
        else:
            results, isolation = finished[0], finished[1]["isolation"]
        report = _report(options.k, samples, results, options.task == "gsm8k") | {
            "tasks_in_data": len(rows),
            "isolation": isolation,
            "request": request,
        }
        if finished is None or report != finished[1]:
            atomic.write_json(options.output_dir / "report.json", report)
        if finished is None:
            # Last: results without a report would be nobody's.
            _partial(options.output_dir, request).replace(options.output_dir / "results.jsonl")
    if report["tasks"] < len(rows):
        print(f"only {report['tasks']} of the {len(rows)} tasks of the data have samples", file=sys.stderr)
    return report


def print_report(report: Mapping[str, Any], folder: Path) -> None:
    """Print the table for people, and where the files are."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"{report['request']['task']}: {report['samples']} samples of {report['tasks']} tasks")
    for heading in ("", "%", "95 % interval"):
        shown.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for name, (low, high) in report["intervals"].items():
        shown.add_row(name, f"{100 * report[name]:.1f}", f"{100 * low:.1f} to {100 * high:.1f}")
    for group in ("rules", "statuses"):
        for name, count in report[group].items():
            shown.add_row(f"{name} ({count})", f"{100 * count / report['samples']:.1f}", "")
    Console().print(shown)
    if report["isolation"]:
        print(report["isolation"])
    print(f"results   {folder / 'results.jsonl'}\nreport    {folder / 'report.json'}")


# What is asked


def _rows(options: Options) -> dict[str, Row]:
    """Return the data's rows by the id that samples name them with."""
    if options.task == "gsm8k":
        loaded = gsm8k.load("eval", options.data)
        return {f"gsm8k/test/{i}": {**row, "prompt_style": options.style} for i, row in enumerate(loaded)}
    return {
        row["id"]: row
        for row in (humaneval.load("eval", options.data) if options.task == "humaneval" else mbpp.read(options.data))
    }


def _read_samples(options: Options, rows: Mapping[str, Row]) -> list[Sample]:
    samples = []
    for where, line in json_lines.read(options.samples, "one JSON object with 'task_id' and 'completion' a line"):
        if not isinstance(line, dict):
            raise UserError(f"{where}: got {type(line).__name__}; expected an object with 'task_id' and 'completion'")
        for key, kinds in (("task_id", (str, int)), ("completion", str)):
            if not isinstance(line.get(key), kinds):
                got = f"is {line[key]!r:.60}" if key in line else "is missing"
                raise UserError(f"{where}: {key!r} {got}; expected a JSON object with 'task_id' and 'completion'")
        task_id = str(line["task_id"])
        if options.task == "mbpp":
            task_id = f"mbpp/{task_id[5:] if task_id[:5].lower() == 'mbpp/' else task_id}"
        if task_id not in rows:
            raise UserError(
                f"{where}: unknown task_id {line['task_id']!r}; the data has {len(rows)}, such as {next(iter(rows))!r}"
            )
        samples.append(Sample(line, rows[task_id]))
    return samples


def _check_k(ks: Sequence[int], samples: Sequence[Sample]) -> None:
    fewest = min(Counter(sample.row["id"] for sample in samples).values())
    if not ks or min(ks) < 1:
        raise UserError(f"--k is {' '.join(map(str, ks)) or 'empty'}; expected whole numbers of at least 1")
    if min(ks) > fewest:
        raise UserError(f"--k {min(ks)} exceeds {fewest}, the fewest samples of a task; pass --k {fewest} or less")


# Grading


def _grade(options: Options, samples: Sequence[Sample], request: Mapping[str, Any]) -> tuple[list[Result], str | None]:
    """Grade what an earlier process has not, chunk by chunk; return all results and the isolation."""
    isolation = None if options.task == "gsm8k" else sandbox.start(options.sandbox)
    path = _partial(options.output_dir, request)
    results: list[Result] = json_lines.read_finished(path)
    json_lines.cut(path, len(results))
    if results:
        print(f"{len(results)} of {len(samples)} samples are graded already", file=sys.stderr)
    progress = Progress(len(samples), f"grading {options.task}")
    with contextlib.closing(progress), path.open("a", encoding="utf-8") as file:
        for start in range(len(results), len(samples), _CHUNK):
            new = _grade_chunk(options.task, samples[start : start + _CHUNK])
            json_lines.append(file, new)
            results += new
            progress.show(len(results), f"{sum(result['passed'] for result in results) / len(results):.1%} pass")
    return results, isolation


def _grade_chunk(task: str, samples: Sequence[Sample]) -> list[Result]:
    if task == "gsm8k":
        graded = [gsm8k.grade(sample.completion, sample.row) for sample in samples]
        return [
            {
                **sample.line,
                "passed": verdict.passed,
                "result": "passed" if verdict.passed else f"failed: {verdict.reason}",
                "status": "passed" if verdict.passed else verdict.reason,
                **verdict.rules,
            }
            for sample, verdict in zip(samples, graded, strict=True)
        ]
    sources = [sample.row.get("completion_prefix", "") + sample.completion for sample in samples]
    outcomes = run_sources(sources, [sample.row for sample in samples])
    return [
        {**sample.line, "passed": verdict.passed, "result": _wording(verdict), "status": verdict.status}
        for sample, (_, verdict) in zip(samples, outcomes, strict=True)
        if verdict is not None
    ]


def _wording(verdict: sandbox.Verdict) -> str:
    """Say a verdict as the harness does."""
    if verdict.passed:
        return "passed"
    return "timed out" if verdict.status == "timeout" else f"failed: {verdict.message or verdict.status}"


# What is there already


def _partial(folder: Path, request: Mapping[str, Any]) -> Path:
    """Return the file of results so far; its name tells this evaluation from any other."""
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    return folder / f".results.{digest[:12]}.partial"


def _finished(folder: Path, request: Mapping[str, Any]) -> tuple[list[Result], dict[str, Any]] | None:
    """Return the results and the report of this evaluation if it is finished.

    Raises:
        UserError: the folder holds another evaluation, or something that is none.
    """
    path, other = folder / "report.json", f"{folder} holds another evaluation; choose another --output-dir"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output-dir {folder} is a file; choose another --output-dir")
    if not path.exists():
        if (folder / "results.jsonl").exists():
            raise UserError(other)
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        asked = report["request"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(other) from None
    if asked != request:
        differing = ", ".join(
            sorted(key for key in request.keys() | asked.keys() if request.get(key) != asked.get(key))
        )
        raise UserError(f"{other} ({differing} differ)")
    if not (folder / "results.jsonl").exists():
        return None
    results = json_lines.read_finished(folder / "results.jsonl")
    if len(results) != report["samples"]:
        raise UserError(f"{folder}/results.jsonl has lost lines; delete {folder} and run the command again")
    return results, report


def _report(ks: Sequence[int], samples: Sequence[Sample], results: Sequence[Result], is_gsm8k: bool) -> dict[str, Any]:
    """Return pass@k with intervals, and counts of results."""
    total: Counter[str] = Counter()
    correct: Counter[str] = Counter()
    for sample, result in zip(samples, results, strict=True):
        total[sample.row["id"]] += 1
        correct[sample.row["id"]] += result["passed"]
    num_samples, num_correct = [total[name] for name in total], [correct[name] for name in total]
    report: dict[str, Any] = {}
    intervals: dict[str, list[float]] = {}
    for k in sorted({k for k in ks if k <= min(num_samples)}):
        values = passk.per_task_pass_at_k(num_samples, num_correct, k)
        report[f"pass@{k}"] = float(values.mean())
        once = max(num_samples) == 1
        interval = passk.wilson_interval(sum(num_correct), len(total)) if once else passk.bootstrap_interval(values)
        intervals[f"pass@{k}"] = list(interval)
    rules = ("strict", "flexible", "robust") if is_gsm8k else ()
    return report | {
        "intervals": intervals,
        "tasks": len(total),
        "samples": len(results),
        "statuses": dict(sorted(Counter(result["status"] for result in results).items())),
        "rules": {rule: sum(result[rule] for result in results) for rule in rules},
    }
