"""Show a run as one page: what it learned, why it did not, and everything that the model wrote.

    python scripts/report.py outputs/gsm8k_lora
    python scripts/report.py outputs/gsm8k_lora outputs/another --open      # two runs beside each other

The page is one file without a network: it can be mailed. It is written at the end of every run, too; of a run that
still goes on it shows how far it has come.
"""

import sys

from lora_grpo.cli import read_flags, run_command
from lora_grpo.report import ReportOptions, report


def main() -> None:
    report(read_flags(ReportOptions, sys.argv[1:], prog="report.py", description=str(__doc__)))


if __name__ == "__main__":
    sys.exit(run_command(main))
