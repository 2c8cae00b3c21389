"""Check the forecast of `--preview` on short runs of the starter recipes with settings drawn at random.

    python tools/check_forecast.py outputs/forecast                      # 96 runs, half a minute each
    python tools/check_forecast.py outputs/forecast --first 100 --runs 4

Run N draws its settings from seed N: the recipe, how many calculations a problem has, the learning rate, the numbers of
steps, prompts and completions, and the limit of a completion. The formula of `lora_grpo/forecast.py` and its constants
were chosen on the runs before number 64; the others check it. Finished runs are kept, so a repeated command continues.

    python tools/check_forecast.py outputs/forecast --fit                # try other constants on the first 64 runs

The table shows how many intervals hold the outcome, and the mean width of the interval of pass@1. `--fit` compares
constants by the mean interval score of pass@1, in points: the width, plus 20 times the distance to an outcome outside
of it. Lower is better (Gneiting and Raftery 2007, doi:10.1198/016214506000001437).
"""

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kept_runs import train

from lora_grpo import forecast
from lora_grpo.evaluation import Report, read_report, wilson_interval
from lora_grpo.report.forecasts import forecasts
from lora_grpo.runs import RunFiles, read_run

USED = 64
"""Number of runs that the formula was chosen on."""
TASK = """
from lora_grpo.starter import problems
from lora_grpo.tasks import chat, get_task

SYSTEM_PROMPT = chat.SYSTEM_PROMPTS["xml"]


def load(split):
    return [row for row in problems("starter", split) if row["difficulty"] == {difficulty}]


def check(completion, row):
    return get_task("starter").check(completion, row).passed
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--runs", type=int, default=96, help="number of runs")
    parser.add_argument("--fit", action="store_true", help="compare constants on the runs of the fit")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for difficulty in (1, 2, 3):
        (folder / f"difficulty_{difficulty}.py").write_text(TASK.format(difficulty=difficulty), encoding="utf-8")
    numbers = range(arguments.first, arguments.first + arguments.runs)
    for number in numbers:
        train(folder / f"run-{number:03d}", *settings(folder, number))
    runs = {number: read(folder / f"run-{number:03d}") for number in numbers}
    sets = {
        "of the fit": [run for number, run in runs.items() if number < USED],
        "others": [run for number, run in runs.items() if number >= USED],
    }
    if arguments.fit:
        fit(sets["of the fit"])
    print("| runs | forecast | intervals that hold the outcome | mean width |\n|---|---|---:|---:|")
    for name, each in sets.items():
        if each:
            show(name, each)


def settings(folder: Path, number: int) -> list[Any]:
    """Return the recipe and the flags of a run."""
    rng = random.Random(number)
    task = rng.choice(["gsm8k", "gsm8k", "code", 1, 2, 3])
    recipe = "code_lora" if task == "code" else "gsm8k_lora"
    flags = [recipe, "--preset", "starter", "--seed", number]
    flags += ["--task", folder / f"difficulty_{task}.py"] if isinstance(task, int) else []
    flags += ["--train.learning-rate", f"{math.exp(rng.uniform(math.log(1e-4), math.log(2e-3))):.1e}"]
    flags += ["--train.max-steps", rng.randint(4, 40), "--train.prompts-per-step", rng.choice([4, 8])]
    flags += ["--sampling.num-generations", rng.choice([4, 8, 16])]
    flags += ["--sampling.max-completion-tokens", 56 if task == "code" else rng.choice([32, 48, 64])]
    flags += ["--data.eval-limit", "200", "--eval.num-samples", "2", "--eval.k", "1"]
    return [*flags, "--train.micro-batch-size", "16", "--monitor.rows", "0", "--monitor.stop-on", "nan"]


Run = tuple[RunFiles, Report | None]


def read(run: Path) -> Run:
    return read_run(run), read_report(run / "evaluation")


def show(name: str, runs: Sequence[Run]) -> None:
    """Print how many intervals of these runs hold the outcome."""
    found = [each for run in runs if (each := forecasts(*run))]
    for what in ("groups", "reward", "pass@1"):
        pairs = [next(pair for key, pair in each.items() if key.startswith(what)) for each in found]
        held = [forecast.low <= outcome <= forecast.high for forecast, outcome in pairs]
        width = statistics.fmean(forecast.high - forecast.low for forecast, _ in pairs)
        low, high = wilson_interval(sum(held), len(held))
        share = f"{sum(held)} of {len(held)}, {100 * sum(held) / len(held):.0f}% [{100 * low:.0f}, {100 * high:.0f}]"
        print(f"| {name} | {what} | {share} | {width:.2f} |")
    print(f"| {name} | without a forecast | {len(runs) - len(found)} of {len(runs)} | |")


def fit(runs: Sequence[Run]) -> None:
    """Print the interval score of each pair of constants, best first."""
    scores = []
    for forecast.SPEED, forecast.SPREAD in itertools.product(range(100, 225, 25), (0.2, 0.3, 0.4, 0.5, 0.6)):
        found = [pair for run in runs for key, pair in forecasts(*run).items() if key.startswith("pass@1")]
        misses = [max(0.0, each.low - outcome, outcome - each.high) for each, outcome in found]
        widths = [each.high - each.low for each, _ in found]
        score = 100 * statistics.fmean(width + 20 * miss for width, miss in zip(widths, misses, strict=True))
        scores.append((score, forecast.SPEED, forecast.SPREAD))
    for score, speed, spread in sorted(scores)[:5]:
        print(f"SPEED {speed}, SPREAD {spread}: interval score {score:.1f} points")
    _, forecast.SPEED, forecast.SPREAD = min(scores)


if __name__ == "__main__":
    main()
