"""Measure how closely a run with `--hours` keeps to its time, when it is stopped once and resumed.

For each budget, the starter recipe starts, is stopped after a third of the budget, in turn by SIGKILL and by Ctrl-C,
and resumes. Nothing else should run on the machine.

    python tools/benchmark_hours.py                    # 3, 6 and 12 minutes
    python tools/benchmark_hours.py --minutes 3 --seed 1 --recipe code_lora

Columns, in seconds: the budget; the wall time of the two commands together; `seconds_worked` of run.json; and both as a
share of the budget. Then the planned and the trained steps, the evaluated rows, and the pass@1 of base and trained
model. The goal is a share between 0.9 and 1.1. Further arguments are passed to the recipe.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmark_step import environment

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("budget", "stopped by", "wall", "share", "worked", "share", "steps planned", "trained", "rows", "pass@1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, nargs="+", default=[3, 6, 12])
    parser.add_argument("--recipe", default="gsm8k_lora", help="name of the recipe (default: %(default)s)")
    arguments, flags = parser.parse_known_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---:|' * len(COLUMNS)}", flush=True)
    for number, minutes in enumerate(arguments.minutes):
        stop = (signal.SIGKILL, signal.SIGINT)[number % 2]
        with tempfile.TemporaryDirectory() as folder:
            print(
                f"| {' | '.join(measure(minutes, stop, arguments.recipe, Path(folder) / 'run', flags))} |", flush=True
            )


def measure(minutes: float, stop: signal.Signals, recipe: str, run: Path, flags: list[str]) -> list[str]:
    """Run the recipe, stop it once and resume it, and return the cells of its row."""
    budget = 60 * minutes
    command = [sys.executable, f"recipes/{recipe}.py", "--preset", "starter", "--output-dir", str(run)]
    wall = execute([*command, "--hours", str(minutes / 60), *flags], stop, budget / 3)
    wall += execute([*command, "--resume"])
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    report = json.loads((run / "evaluation" / "report.json").read_text(encoding="utf-8"))
    worked, planned, used = record["seconds_worked"], record["time_budget"]["planned"], record["time_budget"]["used"]
    base, trained = (report[model]["scores"]["pass@1"] for model in ("baseline", "evaluated"))
    return [
        *(f"{budget:.0f}", stop.name, f"{wall:.1f}", f"{wall / budget:.3f}", f"{worked:.1f}"),
        *(f"{worked / budget:.3f}", f"{planned['steps']:.0f}", f"{used['steps']:.0f}"),
        *(str(report["protocol"]["rows"]), f"{base:.1%} -> {trained:.1%}"),
    ]


def execute(command: list[str], stop: signal.Signals | None = None, after: float = 0.0) -> float:
    """Run a command of this tree, or stop it after some seconds, and return its wall time. Exit with its errors."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(ROOT), stdout=output, stderr=output)
        if stop:
            try:
                process.wait(after)
            except subprocess.TimeoutExpired:
                process.send_signal(stop)
        code = process.wait()
        if code != (0 if not stop else -stop if stop == signal.SIGKILL else 128 + stop):
            output.seek(0)
            sys.exit(f"exit code {code} from {' '.join(command)}\n{output.read()}")
    return time.monotonic() - began


if __name__ == "__main__":
    main()
