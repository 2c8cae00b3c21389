"""See whether this GPU runs the kit: the real recipe, with every engine and backend that is installed, within minutes.

    python scripts/check_gpu.py                    # 8 minutes at most, no network
    python scripts/check_gpu.py --minutes 20
    python scripts/check_gpu.py --pretend-gb 16    # as if the card had 16 GB

Models have the shapes of Qwen2.5-0.5B, 1.5B and 3B and random weights. A row says how long a step took and where, which
share of the card's own limits (measured first) that is, and how much memory was planned and taken. The table so far is
always in outputs/check_gpu/results.md. The exit code is 1 where a row failed, 2 where there is no GPU.
"""

import sys
from pathlib import Path

from lora_grpo.cli import read_flags, run_command
from lora_grpo.gpu_check import Options, check_gpu

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "gsm8k_lora.py"


def main() -> None:
    check_gpu(read_flags(Options, sys.argv[1:], prog="check_gpu.py", description=str(__doc__)), RECIPE)


if __name__ == "__main__":
    sys.exit(run_command(main))
