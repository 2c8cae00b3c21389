"""Merge an adapter into its base model, in Hugging Face format, and report how much is lost to rounding.

    python scripts/merge.py outputs/gsm8k_lora                      # to outputs/gsm8k_lora/merged
    python scripts/merge.py my_adapter --base Qwen/Qwen2.5-1.5B-Instruct --output-dir merged --dtype bf16

Small updates can be lost in bfloat16. The report shows how much of the update survives, and `--dtype auto` uses the
lowest precision that keeps 99% of it. If the merge is interrupted, run the same command to continue.
"""

import sys

from lora_grpo.cli import read_flags, run_command
from lora_grpo.merging import MergeOptions, merge


def main() -> None:
    merge(read_flags(MergeOptions, sys.argv[1:], prog="merge.py", description=str(__doc__)))


if __name__ == "__main__":
    sys.exit(run_command(main))
