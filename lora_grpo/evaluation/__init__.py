"""Evaluation: sample a model on rows with known answers, grade, and compare two models with paired tests.

    before = evaluate(run, sampler, data.eval, "base")      # one line per sample, with its verdict
    after = evaluate(run, sampler, data.eval, "trained")
    report_run(run, before, after)                          # report.json and report.md
    read_report(run.evaluation).evaluated.scores["pass@1"]

    rows -> sample and grade -> results.jsonl -> measure, compare -> report.json, report.md

Results are written as they are produced. A killed evaluation resumes, and a finished one does not load the model again.

evaluate_model.py  `lora-grpo evaluate`: from flags to reports
options.py         the flags of the command; a run's settings are the defaults
model_samples.py   a model as a target: loads and samples it
samples_file.py    a file of completions from another tool as a target
run.py             the evaluation of a run, before and after training
sample_rows.py     samples and grades rows; resumes where it was killed
units.py           splits rows into units that are sampled and written together
shares.py          one process or several that write the results
results.py         the files of an evaluation: results.jsonl, and evaluation.json with model, data and settings
measurement.py     metrics of one model
comparison.py      compares two models: paired tests, and the problems that changed
gain.py            how much of a gain comes from the answer format
pass_at_k.py       pass@k, confidence intervals and paired tests, with references
protocol.py        what two evaluations must share to be comparable
report.py          the schema of report.json; makes, reads, writes and prints reports
joint.py           several tasks in one table, with p-values adjusted by Holm's method
tables.py          tables as text
schema.py          what all parts of report.json have in common

A problem is one row of a task. results.jsonl and report.json name it by `task_id`, the key of HumanEval's harness.
"""

from lora_grpo.evaluation.comparison import Comparison
from lora_grpo.evaluation.evaluate_model import Evaluations, TaskEvaluation, evaluate_and_report, evaluate_tasks
from lora_grpo.evaluation.gain import FORMAT_NOTE
from lora_grpo.evaluation.joint import Joint, read_also
from lora_grpo.evaluation.measurement import UNPARSED, PassCount
from lora_grpo.evaluation.options import EvaluateOptions
from lora_grpo.evaluation.pass_at_k import bootstrap_interval, estimate_pass_at_k, mcnemar_exact, wilson_interval
from lora_grpo.evaluation.report import Report, read_report, read_reports
from lora_grpo.evaluation.results import Result, has_failed
from lora_grpo.evaluation.run import evaluate, report_run
from lora_grpo.evaluation.sample_rows import count_passed, sample_and_grade
from lora_grpo.evaluation.schema import percent
