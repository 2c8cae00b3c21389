"""Write a report on a run: results, diagnostics, and every completion on one page.

    python scripts/report.py outputs/gsm8k_lora
    python scripts/report.py outputs/gsm8k_lora outputs/another      # two runs side by side

The report is one self-contained HTML file that works offline. Every run writes it at the end; for an unfinished run,
this script reports the progress so far.
"""

import sys

from lora_grpo.cli import read_flags, run_command
from lora_grpo.report import ReportOptions, report


def main() -> None:
    report(read_flags(ReportOptions, sys.argv[1:], prog="report.py", description=str(__doc__)))


if __name__ == "__main__":
    sys.exit(run_command(main))
