"""Evaluation: samples, verdicts, pass@k, comparisons and their report."""

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
from lora_grpo.evaluation.run import Draws, draw_and_grade, evaluate

__all__ = [
    "UNPARSED",
    "Draws",
    "EvaluateOptions",
    "Graded",
    "Interval",
    "Protocol",
    "Report",
    "Result",
    "Sampling",
    "Source",
    "bootstrap_interval",
    "counts_by_task",
    "draw_and_grade",
    "evaluate",
    "evaluate_and_report",
    "how_graded",
    "make_report",
    "mcnemar_exact",
    "outcome",
    "printable",
    "read_report",
    "task_id",
    "verdict",
    "wilson_interval",
    "write_report",
]
