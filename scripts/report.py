"""Show a run as one page: what it learned, why it did not, and everything the model wrote.

    python scripts/report.py outputs/gsm8k_lora
    python scripts/report.py outputs/gsm8k_lora outputs/another --open      # two runs side by side

The page is one self-contained file that works offline. Every run writes it when it ends; for a run that is still going,
this script shows the progress so far.
"""

import sys

from lora_grpo.cli import read_flags, run_command
from lora_grpo.report import ReportOptions, report


def main() -> None:
    report(read_flags(ReportOptions, sys.argv[1:], prog="report.py", description=str(__doc__)))


if __name__ == "__main__":
    sys.exit(run_command(main))
