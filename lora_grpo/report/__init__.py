"""A run as one self-contained page: what it learned, why it did not, and everything that the model wrote.

run_files (what is in a run's folder, whatever became of the run) -> facts (what is said of it), plots (what is drawn),
sampled_texts (what the model wrote) -> charts (a plot as SVG and PNG), html and markdown -> writing (the files);
diff (two runs), visible (characters that would not show), command (`scripts/report.py`).
"""

from lora_grpo.report.command import Options, report
from lora_grpo.report.writing import report_line, write_diff, write_report

__all__ = ["Options", "report", "report_line", "write_diff", "write_report"]
