"""Measure the time until a held-out pass@1 reaches a goal: the recipe, a script with TRL, and one with Unsloth.

The sides are those of tools/benchmark_step.py, which do the same work: `plain` is a script with TRL's GRPOTrainer,
`unsloth` the script with Unsloth's model, whose trainer on a CPU is TRL's (after `make engines`), `now` the recipe.
They take turns, each in its own process, for each seed. Each keeps a checkpoint every few steps. Then
`scripts/evaluate.py` evaluates the checkpoints in order, with the rows and sampling of EVALUATION, up to the first that
reaches the goal. The crossing is interpolated between this checkpoint and the one before.

    python tools/benchmark_accuracy.py --sides plain unsloth now --seeds 0 1 2
    python tools/benchmark_accuracy.py --workload laptop --start outputs/sft_lora --goal 0.75 --every 2
    python tools/benchmark_accuracy.py --workload tools --start outputs/sft_lora --goal 0 --every 10 --seeds 1 2 3

In the last two examples, `--start` is the SFT run of recipes/laptop_lora.py and of recipes/sql_lora.py. In the last
one, all sides train 10 steps of 3 prompts, and only the last checkpoint is evaluated, because 200 conversations take
minutes: seconds are those of all steps.

Columns: step of the crossing; seconds and CPU seconds of all steps up to it, without validation and checkpoints; the
pass@1 of the last checkpoint that was evaluated. A ratio is the median over seeds, with its range. `-` is a goal that
was not reached.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmark_step import ROOT, SIDES, WORKLOADS, execute, median_and_range

from lora_grpo.files import markdown_table

EVALUATION = {
    "starter": (
        *("--task", "starter", "--limit", "400", "--num-samples", "4", "--max-completion-tokens", "64"),
        *("--style", "xml", "--temperature", "1"),
    ),
    "laptop": (
        *("--task", "recipes/laptop_lora.py", "--limit", "150", "--num-samples", "2"),
        *("--max-completion-tokens", "40", "--temperature", "1"),
    ),
    "tools": (
        *("--task", "recipes/sql_lora.py", "--limit", "200", "--num-samples", "1"),
        *("--max-completion-tokens", "304", "--temperature", "0.9"),
    ),
}
"""The rows and sampling of the recipes' evaluations, except that `tools` has no limit of 96 tokens for a turn."""
TRAINING = {"tools": ("--train.prompts-per-step", "3", "--train.max-steps", "10")}
"""Flags in place of those of tools/benchmark_step.py."""
COLUMNS = {"step": "step", "seconds": "seconds", "cpu": "CPU seconds"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*EVALUATION], default="starter")
    parser.add_argument("--sides", nargs="+", choices=[*SIDES], default=["plain", "now"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--goal", type=float, default=0.85, help="pass@1 to reach (default: %(default)s)")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--start", type=Path, help="the SFT run that all sides of `laptop` and `tools` continue from")
    options = parser.parse_args()
    if (options.workload != "starter") != bool(options.start):
        parser.error("--start is needed for the workloads laptop and tools, and only for them")
    found: dict[str, list[dict[str, float]]] = {side: [] for side in options.sides}
    for number, seed in enumerate(options.seeds):
        for side in options.sides if number % 2 == 0 else reversed(options.sides):
            command = [*WORKLOADS[options.workload], *TRAINING.get(options.workload, ()), "--seed", str(seed)]
            command += ["--lora.from", str(options.start.resolve())] if options.start else []
            with tempfile.TemporaryDirectory() as folder:
                result = measure(side, Path(folder), command, options, seed)
            found[side].append(result)
            print(f"seed {seed}, {side}: {result}", file=sys.stderr, flush=True)
    print(table(found, options.seeds))


def measure(side: str, folder: Path, command: list[str], options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Train one side, and return the point at which its pass@1 crosses the goal."""
    run, file = folder / "run", folder / "steps.jsonl"
    kept = ["--train.checkpoint-steps", str(options.every), "--train.keep-checkpoints", "1000"]
    execute(str(ROOT / "tools" / "benchmark_step.py"), "--child", side, str(file), *command, *kept, *SIDES[side],
            "--output-dir", str(run))  # fmt: skip
    steps = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    checkpoints = sorted((int(path.name.split("-")[1]), path) for path in run.rglob("checkpoint-*"))

    def point(step: int, checkpoint: Path) -> dict[str, float]:
        seconds, cpu = (sum(each[name] for each in steps[:step]) for name in ("step", "cpu"))
        moved = checkpoint.rename(folder / checkpoint.name)  # out of the run, whose settings evaluation would use
        reached = evaluate(moved, folder / str(step), options.workload, seed)
        return {"step": step, "seconds": seconds, "cpu": cpu, "pass@1": reached}

    return crossing((point(*each) for each in checkpoints), options.goal)


def crossing(points: Iterable[dict[str, float]], goal: float) -> dict[str, float]:
    """Return the interpolated point at which the pass@1 reaches the goal, with the pass@1 of the first one above it.

    Nothing is known of the start, so the first point itself is the crossing if it reaches the goal. Other points are
    not computed.
    """
    before: dict[str, float] = {}
    for point in points:
        if point["pass@1"] >= goal:
            share = (goal - before["pass@1"]) / (point["pass@1"] - before["pass@1"]) if before else 1.0
            earlier = before or point
            return {**point, **{name: earlier[name] + share * (point[name] - earlier[name]) for name in COLUMNS}}
        before = point
    return {**before, **dict.fromkeys(COLUMNS, math.nan)}


def evaluate(checkpoint: Path, folder: Path, workload: str, seed: int) -> float:
    """Return the pass@1 of a checkpoint on held-out rows, with the flags of EVALUATION."""
    flags = [*EVALUATION[workload], "--k", "1", "--seed", str(seed), "--bits", "4"]
    execute("scripts/evaluate.py", str(checkpoint), "--output-dir", str(folder), *flags)
    return float(json.loads((folder / "report.json").read_text(encoding="utf-8"))["pass@1"])


def table(found: dict[str, list[dict[str, float]]], seeds: list[int]) -> str:
    """Return a Markdown table with a row for each side and seed, and ratios to the first side."""
    headings = ["", "seed", *COLUMNS.values(), "pass@1, %"]
    rows = [
        [side, str(seed), *(cell(point[name]) for name in COLUMNS), f"{point['pass@1']:.1%}"[:-1]]
        for side, points in found.items()
        for seed, point in zip(seeds, points, strict=True)
    ]
    first, *others = found
    for side in others:
        ratios = {name: [ours[name] / theirs[name] for ours, theirs in zip(found[side], found[first], strict=True)]
                  for name in COLUMNS}  # fmt: skip
        rows.append([f"{side} / {first}", "", *map(median_and_range, ratios.values()), ""])
    return "\n".join(markdown_table(headings, rows))


def cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.1f}"


if __name__ == "__main__":
    main()
