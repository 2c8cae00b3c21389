"""Evaluation: sample a model on rows with known answers, grade, and compare two models with paired tests.

    before = evaluate(run, sampler, data.eval, "base")      # one line per sample, with its verdict
    after = evaluate(run, sampler, data.eval, "trained")
    report_run(run, before, after)                          # report.json and report.md
    read_report(run.evaluation).evaluated.scores["pass@1"]

    rows -> sample and grade -> results.jsonl -> measure, compare -> report.json, report.md

Results are written as they are produced. A killed evaluation resumes, and a finished one does not load the model again.

cli.py           `lora-grpo evaluate`: from flags to a report; loads and samples models
options.py       the flags of the command; a run's settings are the defaults
samples_file.py  grades a file of completions from another tool
run.py           samples and grades rows, with one or several processes; the evaluation of a run
results.py       the files of an evaluation: results.jsonl, and evaluation.json with model, data and settings
measurement.py   metrics of one model; compares two: paired tests, changed tasks, the gain from the answer format
pass_at_k.py     pass@k, confidence intervals and paired tests, with references
joint.py         several tasks in one table, with p-values adjusted by Holm's method
report.py        the schema of report.json; makes, reads, writes and prints reports
"""

from lora_grpo.evaluation.evaluate_model import EvaluatedTask, evaluate_and_report, evaluate_tasks
from lora_grpo.evaluation.joint import Joint, read_also
from lora_grpo.evaluation.measurement import FORMAT_NOTE, UNPARSED, Comparison, percent
from lora_grpo.evaluation.options import EvaluateOptions
from lora_grpo.evaluation.pass_at_k import bootstrap_interval, estimate_pass_at_k, mcnemar_exact, wilson_interval
from lora_grpo.evaluation.report import Report, read_report, read_reports
from lora_grpo.evaluation.results import Result
from lora_grpo.evaluation.run import count_passed, evaluate, report_run, sample_and_grade
