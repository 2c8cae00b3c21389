"""Compare ways to scale rewards: short runs of the starter recipes with the same seeds, rows and number of steps.

    python tools/compare_scaling.py outputs/scaling --tasks gsm8k code           # 21 runs of one or two minutes
    python tools/compare_scaling.py outputs/scaling --tasks late --steps 56      # 12 runs

Scalings: `group`, `batch` and `none` are TRL's `scale_rewards`: a group's centered rewards are divided by its standard
deviation, by that of the batch, or not at all. `each` normalizes every reward in its group, and their sum in the batch
(`multi_objective_aggregation=normalize_then_sum`).

Tasks: `gsm8k` and `code` are the default recipes. `late` is the first one on a base that calculates in only a tenth of
its answers and guesses in the others, half of them in the requested format, so it learns the format before the answer.
The reward of `code` is 0 or 1, so `each` would be `group` at another learning rate.

The scalings take turns, seed by seed. Finished runs are kept, so a repeated command continues. Columns: pass@1 on the
validation rows every few steps, with one sample per row and the same sampling seeds; the area under this curve, as its
mean over the steps; and the step from which 95% of the validation completions have the format. p is that of a paired
permutation test against `group`, over rows and seeds. It covers the noise of rows and samples, but not that of another
training: see the differences by seed.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from check_gain import build
from kept_runs import train

from lora_grpo.evaluation.pass_at_k import paired_permutation

SCALINGS = {
    "group": "scale_rewards=group",
    "batch": "scale_rewards=batch",
    "none": "scale_rewards=none",
    "each": "multi_objective_aggregation=normalize_then_sum",
}
TASKS = {"gsm8k": ("gsm8k_lora", [*SCALINGS]), "code": ("code_lora", ["group", "batch", "none"])}
TASKS["late"] = ("gsm8k_lora", [*SCALINGS])
LATE = (0.1, 0.5)
"""Share of careful answers, and share of answers in the format, of the base of `late`."""
EVERY = 8
"""Steps between validation passes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help=f"steps of a run, a multiple of {EVERY}")
    arguments = parser.parse_args()
    if arguments.steps < EVERY or arguments.steps % EVERY:
        parser.error(f"--steps must be a multiple of {EVERY}, got {arguments.steps}")
    for task in arguments.tasks:
        _, scalings = TASKS[task]
        for number, seed in enumerate(arguments.seeds):
            for scaling in scalings if number % 2 == 0 else reversed(scalings):
                run = arguments.folder / f"{task}-{scaling}-{seed}"
                train(run, *settings(arguments.folder, task, scaling, seed, arguments.steps))
            print(table(arguments.folder, task, arguments.seeds[: number + 1]), flush=True)


def settings(folder: Path, task: str, scaling: str, seed: int, steps: int) -> list[Any]:
    """Return the recipe and the flags of a run."""
    recipe, _ = TASKS[task]
    flags = [recipe, "--preset", "starter", "--seed", seed, "--grpo", SCALINGS[scaling], "--train.max-steps", steps]
    flags += ["--train.checkpoint-steps", steps, "--eval.num-samples", 0, "--data.eval-limit", 20]
    flags += ["--monitor.rows", 200, "--monitor.every-steps", EVERY, "--monitor.stop-on", "nan"]
    return [*flags, "--model.name", build(folder.resolve() / "base", *LATE)] if task == "late" else flags


def validations(run: Path) -> list[list[dict]]:
    """Return the lines of each validation pass, from step 0 on."""
    files = sorted((run / "validation").glob("step-*.jsonl"))
    return [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]


def passed(run: Path) -> np.ndarray:
    """Return whether each row was passed, shape (rows, validation passes)."""
    passes = [{line["id"]: line["passed"] for line in lines} for lines in validations(run)]
    return np.array([[each[row] for each in passes] for row in sorted(passes[0])], dtype=float)


def area(rates: np.ndarray) -> np.ndarray:
    """Return the mean of each row's curve over the steps, by the trapezoid rule."""
    return ((rates[:, 1:] + rates[:, :-1]) / 2).mean(1)


def steps_to_format(run: Path) -> float:
    """Return the step of the first validation pass in which 95% of the completions have the format, or infinity."""
    for number, lines in enumerate(validations(run)):
        if statistics.fmean(line["rewards"].get("strict_xml_format", 0.0) for line in lines) >= 0.95:
            return number * EVERY
    return float("inf")


def table(folder: Path, task: str, seeds: list[int]) -> str:
    """Return a Markdown table of a task's scalings."""
    _, scalings = TASKS[task]
    rates = {name: [passed(folder / f"{task}-{name}-{seed}") for seed in seeds] for name in scalings}
    steps = [EVERY * number for number in range(rates["group"][0].shape[1])]
    head = [f"{task}, seeds {' '.join(map(str, seeds))}", *(f"step {step}" for step in steps), "area", "by seed, p"]
    head += ["last step: by seed, p", "steps to the format"]
    lines = [f"\n| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in scalings:
        curve = np.mean([each.mean(0) for each in rates[name]], axis=0)
        areas, lasts = ([part(each) for each in rates[name]] for part in (area, last))
        cells = [name, *(f"{rate:.1%}" for rate in curve), f"{np.concatenate(areas).mean():.1%}"]
        for ours, part in ((areas, area), (lasts, last)):
            cells.append("" if name == "group" else difference(ours, [part(each) for each in rates["group"]]))
        cells.append(", ".join(f"{steps_to_format(folder / f'{task}-{name}-{seed}'):.0f}" for seed in seeds))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def last(rates: np.ndarray) -> np.ndarray:
    return rates[:, -1]


def difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> str:
    """Return the differences of the means by seed in points, and the p-value over all rows and seeds."""
    by_seed = ", ".join(f"{100 * (one.mean() - other.mean()):+.1f}" for one, other in zip(ours, theirs, strict=True))
    p = paired_permutation(np.concatenate(theirs), np.concatenate(ours))
    return f"{by_seed}; p {'<0.001' if p < 0.001 else f'{p:.3f}'}"


if __name__ == "__main__":
    main()
