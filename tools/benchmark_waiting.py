"""Compare how OpenMP threads wait: steps of the default recipe with several values of GOMP_SPINCOUNT, in turn.

    python tools/benchmark_waiting.py --rounds 3
    python tools/benchmark_waiting.py --rounds 3 --busy 1

A thread that waits for others spins this many times and then sleeps. The kit sets 1,000 (`limit_spinning`). With 0 it
sleeps at once. 300,000 is the default of GCC's OpenMP library, which torch brings. `--busy` runs other processes that
keep a core busy.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lora_grpo.cli import read_flags, run_command
from lora_grpo.errors import RunError, UserError
from lora_grpo.files import json_files

ROOT = Path(__file__).resolve().parents[1]
SIDES = (0, 1_000, 300_000)
STEPS = 8


@dataclass(frozen=True)
class Options:
    """Flags."""

    rounds: int = 3
    """Runs of each side."""
    busy: int = 0
    """Number of other busy processes."""


def step_seconds(spins: int) -> float:
    """Train with the default recipe, and return the median seconds of a step without the first two."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": str(spins)}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        flags = ["--preset", "starter", "--train.max-steps", str(STEPS), "--output-dir", str(run)]
        command = [sys.executable, "recipes/gsm8k_lora.py", *flags, "--data.eval-limit", "1", "--eval.num-samples", "0"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"{spins} spins: exit code {done.returncode}\n{done.stderr[-2000:]}")
        rows = [row for _, row in json_files.read_lines(run / "metrics.jsonl", "metrics")]
    return statistics.median(row["step_time"] for row in rows[2:] if "step_time" in row)


def main() -> None:
    options = read_flags(Options, sys.argv[1:], prog="benchmark_waiting.py", description=str(__doc__))
    if options.rounds < 1 or options.busy < 0:
        raise UserError(
            f"--rounds {options.rounds} --busy {options.busy}: expected --rounds 1 or more, --busy 0 or more"
        )
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    try:
        rounds = [{side: step_seconds(side) for side in SIDES[:: (-1) ** turn]} for turn in range(options.rounds)]
    finally:
        for process in others:
            process.kill()
    print(f"{options.busy} other busy processes, {options.rounds} rounds, medians")
    print("| GOMP_SPINCOUNT | seconds per step | of 0, range |\n|---|---:|---:|")
    for side in SIDES:
        ratios = [of_side[side] / of_side[0] for of_side in rounds]
        seconds = statistics.median(of_side[side] for of_side in rounds)
        print(f"| {side:,} | {seconds:.2f} | {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f} |")


if __name__ == "__main__":
    sys.exit(run_command(main))
