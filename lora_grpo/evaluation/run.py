"""The evaluation of a run: its base before training, the trained model after it, and the comparison of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_grpo.config import DataConfig, RunConfig
from lora_grpo.data import other_task
from lora_grpo.evaluation.joint import ALSO, Joint, make_joint
from lora_grpo.evaluation.protocol import make_protocol
from lora_grpo.evaluation.report import Graded, Report, make_report, write_report
from lora_grpo.evaluation.results import Result, problem_id
from lora_grpo.evaluation.sample_rows import sample_and_grade
from lora_grpo.evaluation.shares import drop_failed
from lora_grpo.files import atomic, json_files
from lora_grpo.grading import Row
from lora_grpo.models import BASE, START, adapter_sha256
from lora_grpo.runs import Run
from lora_grpo.sampling import Sampler, SamplingParams
from lora_grpo.tasks import task_title

TRAINED = "trained"


def evaluate(
    run: Run, sampler: Sampler, rows: Sequence[Row], name: str, also: Mapping[str, Sequence[Row]] | None = None
) -> list[Result]:
    """Evaluate the policy of a run on its evaluation rows: one greedy sample and `eval.num_samples` others per row.

    Results are written to `evaluation/<name>.samples.jsonl`, rows to `evaluation/rows.jsonl`. Greedy samples of the
    tasks in `also` are in `evaluation/joint/also`. The duration is recorded in run.json. When a run is resumed,
    episodes whose agent failed are played again.

    Args:
        rows: R evaluation rows with their prompts.
        name: `base` (before training: without the adapter, or with the one that the run starts from) or `trained`.
        also: the rows of other tasks, by task.

    Returns:
        R x (num_samples + 1) results.
    """
    config = run.config
    is_before_training = name == BASE
    starts_from_adapter = config.lora.from_ is not None
    with_adapter = not is_before_training or starts_from_adapter
    title = START if is_before_training and starts_from_adapter else name
    params = _sampling_params(config)
    seconds_before = run.seconds_worked

    run.evaluation.mkdir(exist_ok=True)
    run.once(lambda: _write_rows(run.evaluation / "rows.jsonl", rows))
    path = run.evaluation / f"{name}.samples.jsonl"
    drop_failed(path)
    task = config.data.evaluation_task
    results = sample_and_grade(path, sampler, rows, task, params, config.seed, title, adapter=with_adapter, greedy=True)

    for other, other_rows in (also or {}).items():
        path = _also_path(run, other, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_failed(path)
        other_title = f"{title} on {task_title(other)}"
        only_greedy = replace(params, num_samples=0)
        sample_and_grade(
            path, sampler, other_rows, other, only_greedy, config.seed, other_title, adapter=with_adapter, greedy=True
        )

    seconds = run.record.get("evaluation_seconds", {})
    if name not in seconds:  # a resumed run keeps the first duration, which is that of all samples
        run.update(evaluation_seconds=seconds | {name: round(run.seconds_worked - seconds_before, 3)})
    return results


@dataclass(frozen=True)
class RunReports:
    """The reports of a run's evaluation."""

    report: Report
    also: Joint | None
    """The joint report of the tasks in `eval.also`; None without such tasks."""


def report_run(run: Run, before: Sequence[Result], after: Sequence[Result]) -> RunReports:
    """Compare the samples of a run's base and trained model, and write the reports."""
    config = run.config
    data_record = run.record["data"]
    params = _sampling_params(config)
    report = _compare(run, config.data, data_record["eval"]["sha256"], params, before, after)
    write_report(run.evaluation, report)
    if not config.eval.also:
        return RunReports(report, also=None)

    other_reports = []
    for task in config.eval.also:
        other_before = json_files.read_finished_lines(_also_path(run, task, BASE))
        other_after = json_files.read_finished_lines(_also_path(run, task, TRAINED))
        data = other_task(config.data, task)
        only_greedy = replace(params, num_samples=0)
        other_reports.append(_compare(run, data, data_record["also"][task], only_greedy, other_before, other_after))
    also = make_joint(other_reports)
    also.write(run.evaluation / ALSO)
    return RunReports(report, also)


def _compare(
    run: Run,
    data: DataConfig,
    rows_sha256: str,
    params: SamplingParams,
    before: Sequence[Result],
    after: Sequence[Result],
) -> Report:
    """Compare the samples of a run's base and trained model on one task."""
    config = run.config
    num_rows = len({result["task_id"] for result in before})
    sandbox = run.record["data"].get("sandbox")
    protocol = make_protocol(data, params, num_rows, config.seed, data_sha256=rows_sha256, sandbox=sandbox)

    policy = run.record["policy"]
    source = {"model": policy["base_model"], "weights_sha256": policy.get("fingerprint"), **policy}
    trained = Graded(TRAINED, after, source | {"adapter_sha256": adapter_sha256(run.adapter)}, protocol)
    start_sha256 = policy.get("start_sha256")
    if start_sha256:
        base = Graded(START, before, source | {"adapter_sha256": start_sha256}, protocol)
    else:
        base = Graded(BASE, before, source, protocol)
    ks = config.eval.k if params.num_samples else ()
    return make_report(ks, trained, base)


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the questions and answers of the evaluation rows, for the report."""
    lines: list[dict[str, Any]] = [
        {"task_id": problem_id(row), "question": row.get("question"), "answer": row.get("answer")} for row in rows
    ]
    atomic.write_text(path, json_files.dump_lines(lines))


def _also_path(run: Run, task: str, name: str) -> Path:
    """Return the file with the samples of a task in `eval.also`; `name` is `base` or `trained`."""
    return run.evaluation / ALSO / f"{task_title(task)}.{name}.samples.jsonl"


def _sampling_params(config: RunConfig) -> SamplingParams:
    """Return how the evaluation samples. A run without numbered samples has only greedy ones."""
    return SamplingParams(
        num_samples=config.eval.num_samples,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        max_tokens=config.sampling.max_completion_tokens,
        max_turn_tokens=config.sampling.max_turn_tokens,
    )
