"""Check whether this GPU can run the kit: a few steps of the actual recipe with every installed engine and backend.

    python scripts/check_gpu.py                    # at most 8 minutes, no network access
    python scripts/check_gpu.py --minutes 20

The models have the shapes of Qwen2.5-0.5B, 1.5B and 3B, with random weights. Each row of the table reports the
step time by phase, how close it comes to the GPU's limits (which are measured first), and the planned and measured
memory.
outputs/check_gpu/results.md always contains the results so far. The last line says which engines and backends work, and
what to pass if some do not. The exit code is 1 if a row failed, and 2 without a GPU.
"""

import sys
from pathlib import Path

from lora_grpo.cli import read_flags, run_command
from lora_grpo.planning import Options, check_gpu

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "gsm8k_lora.py"


def main() -> None:
    check_gpu(read_flags(Options, sys.argv[1:], prog="check_gpu.py", description=str(__doc__)), RECIPE)


if __name__ == "__main__":
    sys.exit(run_command(main))
