"""Merge an adapter into its base: one model in the Hub's layout, with a report of what rounding cost.

    python scripts/merge.py outputs/gsm8k_lora                      # to outputs/gsm8k_lora/merged
    python scripts/merge.py my_adapter --base Qwen/Qwen2.5-1.5B-Instruct --output merged --dtype bf16

Small updates vanish in bfloat16: the report says how much of what was learned is still there, and `--dtype auto` takes
the smallest precision that keeps it. Killed at any moment, the same command goes on.
"""

import sys

from lora_grpo.cli import read_flags, run_command
from lora_grpo.merging import MergeOptions, merge


def main() -> None:
    merge(read_flags(MergeOptions, sys.argv[1:], prog="merge.py", description=str(__doc__)))


if __name__ == "__main__":
    sys.exit(run_command(main))
