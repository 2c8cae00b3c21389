"""Evaluation: samples, verdicts, pass@k, comparisons and their report."""

from lora_grpo.evaluation.cli import evaluate_and_report
from lora_grpo.evaluation.comparison import compare, counts_by_task, task_changes, verdict
from lora_grpo.evaluation.options import Options
from lora_grpo.evaluation.pass_at_k import Interval, bootstrap_interval, mcnemar_exact, wilson_interval
from lora_grpo.evaluation.report import UNPARSED, Page, measure, printable, run_title
from lora_grpo.evaluation.results import Result, outcome, task_id
from lora_grpo.evaluation.run import Draws, draw_and_grade, evaluate

__all__ = [
    "UNPARSED",
    "Draws",
    "Interval",
    "Options",
    "Page",
    "Result",
    "bootstrap_interval",
    "compare",
    "counts_by_task",
    "draw_and_grade",
    "evaluate",
    "evaluate_and_report",
    "mcnemar_exact",
    "measure",
    "outcome",
    "printable",
    "run_title",
    "task_changes",
    "task_id",
    "verdict",
    "wilson_interval",
]
