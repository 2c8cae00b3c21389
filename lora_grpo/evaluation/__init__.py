"""Evaluation: sample a model on rows with known answers, grade, and compare two models with paired tests.

    results = evaluate(run, sampler, data.eval, "trained")      # one line per sample, with its verdict
    report = make_report(protocol, ks, Graded("trained", results, source), Graded("base", before, base_source))
    write_report(folder, report)                                # report.json and report.md
    read_report(folder).evaluated.scores["pass@1"]

    rows -> sample and grade -> results.jsonl -> measure, compare -> report.json, report.md

Results are written as they are produced. A killed evaluation resumes, and a finished one does not load the model again.

cli.py           `scripts/evaluate.py`: from flags to a report
options.py       the flags of the script; a run's settings are the defaults
folder.py        evaluation.json: records which evaluation is in a folder
run.py           samples and grades rows, with one or several processes
samples_file.py  grades a file of completions from another tool
results.py       one graded sample
measurement.py   metrics of one model
comparison.py    compares two models on the same tasks: paired tests, fixed and regressed tasks
pass_at_k.py     pass@k, confidence intervals and paired tests, with references
report.py        the schema of report.json; makes, reads, writes and prints reports
"""

from lora_grpo.evaluation.cli import evaluate_and_report
from lora_grpo.evaluation.comparison import verdict
from lora_grpo.evaluation.measurement import UNPARSED, Source, counts_by_task
from lora_grpo.evaluation.options import EvaluateOptions
from lora_grpo.evaluation.pass_at_k import Interval, bootstrap_interval, mcnemar_exact, wilson_interval
from lora_grpo.evaluation.report import (
    Graded,
    Protocol,
    Report,
    Sampling,
    how_graded,
    make_report,
    printable,
    read_report,
    write_report,
)
from lora_grpo.evaluation.results import Result, outcome, task_id
from lora_grpo.evaluation.run import RowSampling, evaluate, sample_and_grade

__all__ = [
    "UNPARSED",
    "EvaluateOptions",
    "Graded",
    "Interval",
    "Protocol",
    "Report",
    "Result",
    "RowSampling",
    "Sampling",
    "Source",
    "bootstrap_interval",
    "counts_by_task",
    "evaluate",
    "evaluate_and_report",
    "how_graded",
    "make_report",
    "mcnemar_exact",
    "outcome",
    "printable",
    "read_report",
    "sample_and_grade",
    "task_id",
    "verdict",
    "wilson_interval",
    "write_report",
]
