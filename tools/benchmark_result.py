"""Measure how long a recipe takes to a result: seconds until the held-out pass@1 crosses a goal, and the whole run.

`before` is the recipe at the commit `--before`, `now` that of this tree. They take turns, each in its own process, for
each seed. The recipe runs with its default settings, except that it keeps a checkpoint of every fifth step. Afterwards,
this tree evaluates the checkpoints in order, up to the first that reaches the goal, with the run's seed, problems and
sampling settings. The crossing is interpolated between this checkpoint and the one before.

    python tools/benchmark_result.py --before 31c8bed --seeds 0 1 2

Columns: step of the crossing; seconds and CPU seconds of the training steps up to it, without validation and
checkpoints; seconds up to it since the start of the command, with everything; seconds of all forward and backward
passes; seconds and CPU seconds of the whole command, which also evaluates the base and the trained model; and the
pass@1 of both. Further arguments are passed to the recipe.
"""

import argparse
import json
import math
import resource
import statistics
import tempfile
import time
from pathlib import Path

import benchmark_step
from benchmark_step import ROOT, checked_out
from kept_runs import execute

COLUMNS = {"step": "step", "training": "training, s", "cpu": "training, CPU s", "elapsed": "since start, s"}
COLUMNS |= {"passes": "forward and backward, s", "whole": "whole run, s", "whole_cpu": "whole run, CPU s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="commit to compare with; without it there is no such side")
    parser.add_argument("--recipe", default="gsm8k_lora", help="name of the recipe (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--goal", type=float, default=0.85, help="pass@1 to reach (default: %(default)s)")
    arguments, flags = parser.parse_known_args()
    with checked_out(arguments.before) as before:
        sides = {**({"before": before} if before else {}), "now": ROOT}
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        print(f"| | seed | {' | '.join(COLUMNS.values())} | pass@1 |\n|---|---|{'---:|' * len(COLUMNS)}---|")
        for number, seed in enumerate(arguments.seeds):
            for side in list(sides) if number % 2 == 0 else reversed(sides):
                with tempfile.TemporaryDirectory() as folder:
                    result = measure(sides[side], Path(folder), arguments.recipe, seed, arguments.goal, flags)
                found[side].append(result)
                cells = " | ".join(f"{result[name]:.{0 if name != 'step' else 1}f}" for name in COLUMNS)
                print(f"| {side} | {seed} | {cells} | {result['base']:.1%} -> {result['trained']:.1%} |", flush=True)
    if len(sides) == 2:
        for name, title in COLUMNS.items():
            ratios = [now[name] / old[name] for now, old in zip(found["now"], found["before"], strict=True)]
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{title}: now / before = {statistics.median(ratios):.2f} (by seed: {shown})")


def measure(tree: Path, folder: Path, recipe: str, seed: int, goal: float, flags: list[str]) -> dict[str, float]:
    """Run the recipe of a tree and return the columns of its row, NaN for a goal that it does not reach."""
    run, steps = folder / "run", folder / "steps.jsonl"
    command = [benchmark_step.__file__, "--child", "kit", steps, f"recipes/{recipe}.py"]
    command += ["--preset", "starter", "--output-dir", run, "--seed", seed]
    kept = ["--train.checkpoint-steps", "5", "--train.keep-checkpoints", "1000"]
    started, cpu_started = time.time(), children_cpu()
    execute(tree, [*command, *kept, *flags])
    whole, whole_cpu = time.time() - started, children_cpu() - cpu_started
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    scores = json.loads((run / "evaluation" / "report.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in steps.read_text(encoding="utf-8").splitlines()]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    base, trained = (scores[model]["scores"]["pass@1"] for model in ("baseline", "evaluated"))
    result = {"base": base, "trained": trained, "whole": whole, "whole_cpu": whole_cpu}
    result["passes"] = sum(line["time/training"] for line in metrics)
    point = {"step": 0.0, "training": 0.0, "cpu": 0.0, "elapsed": math.nan, "pass@1": base}
    for checkpoint in sorted(run.glob("checkpoints/checkpoint-*"), key=lambda path: int(path.name.split("-")[1])):
        step = int(checkpoint.name.split("-")[1])
        before = point
        point = {
            "step": step,
            "training": sum(line["step"] for line in lines[:step]),
            "cpu": sum(line["cpu"] for line in lines[:step]),
            "elapsed": (checkpoint / "manifest.json").stat().st_mtime - started,
            "pass@1": evaluate(checkpoint, folder / f"evaluation-{step}", record["config"]),
        }
        if point["pass@1"] >= goal:
            share = (goal - before["pass@1"]) / (point["pass@1"] - before["pass@1"])
            return result | {name: old + share * (point[name] - old) for name, old in before.items()}
    return result | dict.fromkeys(("step", "training", "cpu", "elapsed"), math.nan)


def children_cpu() -> float:
    """Return the CPU seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def evaluate(checkpoint: Path, folder: Path, config: dict) -> float:
    """Return the pass@1 of a checkpoint on the held-out problems of its run."""
    sampling, data = config["eval"], config["data"]
    command = ["scripts/evaluate.py", checkpoint, "--output-dir", folder, "--task", data["eval_task"] or data["task"]]
    command += ["--limit", data["eval_limit"], "--seed", config["seed"], "--bits", config["model"]["bits"]]
    command += ["--num-samples", sampling["num_samples"], "--k", "1", "--temperature", sampling["temperature"]]
    command += ["--top-p", sampling["top_p"], "--style", data["prompt_style"], "--few-shot", data["few_shot"]]
    command += ["--max-completion-tokens", config["sampling"]["max_completion_tokens"]]
    execute(ROOT, command)
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))["pass@1"]


if __name__ == "__main__":
    main()
