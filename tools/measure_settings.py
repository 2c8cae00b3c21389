"""Measure the effect of each recommended setting in a short run of a starter recipe.

    python tools/measure_settings.py outputs/settings    # every run, one or two minutes each
    python tools/measure_settings.py outputs/settings --runs default high-rate --seeds 0 1

The runs `trained-temperature-...` start from the adapter of `trained`, and `code-temperature-...` from that of
`code-default`, which have to come first.

Finished runs are kept, so a repeated command continues. Runs with the same seed and
recipe have the same adapter before training, prompts, and held-out problems.

Columns: mean of the last 5 steps, except for the held-out accuracy of the base and the trained model (pass@1, 100
problems x 4 samples at temperature 1). `equal` is the share of groups with equal rewards, `distinct` the number of
distinct completions divided by the group size, and `mixed` the share of groups that have right and wrong completions.
`format` is the mean of the reward for the requested format. Of the first 5 steps: `right 1` is the share of right
completions, `format 1` that mean, and `mixed 4`, `mixed 8` and `mixed 16` are the shares of mixed groups, the smaller
ones drawn from the groups of the run.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmark_step import ROOT, environment

from lora_grpo.files import markdown_table

LAST = 5
"""Number of steps to average over, also for the first ones."""
MEANS = {"reward": "reward", "equal": "frac_reward_zero_std", "entropy": "entropy", "kl": "kl", "gradient": "grad_norm"}
FORMAT = "rewards/strict_xml_format/mean"
MEANS |= {"truncated": "completions/clipped_ratio", "format": FORMAT}
COMMON = (
    *("--preset", "starter", "--monitor.rows", "0", "--data.eval-limit", "100", "--eval.num-samples", "4"),
    *("--eval.k", "1", "--monitor.stop-on", "nan", "--train.completions-steps", "1"),
)

UNEVEN = '''
from lora_grpo.prompts import styles
from lora_grpo.tasks import get_task
from lora_grpo.starter import problems

SYSTEM_PROMPT = styles.SYSTEM_PROMPTS["xml"]
KINDS = ["never", "never", "always", "always", "normal"]


def load(split):
    """Four of five training rows are always or never solved."""
    rows = problems("starter", split)
    kinds = ["normal"] if split == "eval" else KINDS
    return [
        {"question": row["question"], "answer": row["answer"], "kind": kinds[number % len(kinds)]}
        for number, row in enumerate(rows)
    ]


def check(completion, row):
    if row["kind"] != "normal":
        return row["kind"] == "always"
    return get_task("starter").check(completion, row).passed
'''
"""A task whose base pass rates are near 0 and 1."""

STEPS, STEP = ("--train.max-steps", "20"), ("--train.max-steps", "1")
ON_32_PROMPTS = ("--train.prompts-per-step", "32", *STEP)
TRAINED = ("--lora.from", "{folder}/trained-{seed}", *ON_32_PROMPTS)
CODE_TRAINED = ("--lora.from", "{folder}/code-default-{seed}", *ON_32_PROMPTS)
HIGH_RATE = (*STEPS, "--train.learning-rate", "1e-2")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "default": ("gsm8k_lora", STEPS),
    "clipping": ("gsm8k_lora", ("--train.max-steps", "5", "--grpo", "epsilon=0.01", "epsilon_high=0.28", "delta=1.5")),
    "sequence-ratio": ("gsm8k_lora", ("--train.max-steps", "5", "--grpo", "importance_sampling_level=sequence")),
    "entropy-0.01": ("gsm8k_lora", (*STEPS, "--grpo", "entropy_coef=0.01")),
    "beta-0.05": ("gsm8k_lora", (*STEPS, "--train.beta", "0.05")),
    "high-rate": ("gsm8k_lora", HIGH_RATE),
    "high-rate-beta-0.05": ("gsm8k_lora", (*HIGH_RATE, "--train.beta", "0.05")),
    "trained": ("gsm8k_lora", ("--train.max-steps", "60")),
    "trained-temperature-1.0": ("gsm8k_lora", TRAINED),
    "trained-temperature-1.2": ("gsm8k_lora", (*TRAINED, "--sampling.temperature", "1.2")),
    "uneven": ("UNEVEN", STEPS),
    "uneven-filter": ("UNEVEN", (*STEPS, "--data.filter-by-difficulty")),
    "tokens-32": ("gsm8k_lora", (*STEPS, "--sampling.max-completion-tokens", "32")),
    "one-step": ("gsm8k_lora", STEP),
    "one-step-few-shot": ("gsm8k_lora", (*STEP, "--data.few-shot", "2")),
    "one-step-hashes": ("gsm8k_lora", (*STEP, "--data.prompt-style", "hashes")),
    "code-default": ("code_lora", STEPS),
    "code-high-rate": ("code_lora", HIGH_RATE),
    "code-temperature-1.0": ("code_lora", CODE_TRAINED),
    "code-temperature-1.2": ("code_lora", (*CODE_TRAINED, "--sampling.temperature", "1.2")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = {
        (name, seed): {"run": name, "seed": seed, **measure(name, seed, arguments.folder.resolve())}
        for seed in arguments.seeds
        for name in arguments.runs
    }
    wanted = [found[name, seed] for name in arguments.runs for seed in arguments.seeds]
    print(table(wanted))


def measure(name: str, seed: int, folder: Path) -> dict[str, float]:
    """Train and return the columns of a run."""
    recipe, flags = RUNS[name]
    task: tuple[str, ...] = ()
    if recipe == "UNEVEN":
        (folder / "uneven.py").write_text(UNEVEN, encoding="utf-8")
        recipe, task = "your_task", ("--task", str(folder / "uneven.py"))
    run = folder / f"{name}-{seed}"
    flags = tuple(flag.format(folder=folder, seed=seed) for flag in flags)
    train(run, recipe, *COMMON, *task, *flags, "--seed", seed)
    return columns_of(run)


def train(run: Path, recipe: str, *flags: object) -> None:
    """Train a run, unless it is complete."""
    record = run / "run.json"
    if record.is_file() and read_json(record)["status"] == "complete":
        return
    print(f"{run.name}: {recipe}", *flags, flush=True)
    command = [sys.executable, f"recipes/{recipe}.py", "--output-dir", str(run), "--overwrite", *map(str, flags)]
    done = subprocess.run(command, cwd=ROOT, env=environment(ROOT), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"exit code {done.returncode} from {' '.join(command)}\n{done.stderr}")


def columns_of(run: Path) -> dict[str, float]:
    steps, table = read_lines(run / "metrics.jsonl"), read_json(run / "run.json")["results"]["table"]
    (score,) = [row for row in table if row["metric"] == "pass@1"]
    groups = [group for step in steps[-LAST:] for group in groups_of(run, step["step"])]
    first = [group for step in steps[:LAST] for group in groups_of(run, step["step"])]
    size = len(groups[0])
    means = {name: mean([step[metric] for step in steps[-LAST:] if metric in step]) for name, metric in MEANS.items()}
    return {
        "reward 1": steps[0]["reward"],
        "entropy 1": steps[0]["entropy"],
        "right 1": mean([line["passed"] for group in first for line in group]),
        **{f"mixed {number}": mean([mixed(group, number) for group in first]) for number in (4, 8, 16)},
        "format 1": mean([step[FORMAT] for step in steps[:LAST] if FORMAT in step]),
        **means,
        "mixed": mean([mixed(group, size) for group in groups]),
        "distinct": mean([len({line["completion"] for line in group}) / size for group in groups]),
        "unparsed": mean([line["status"] == "no_answer" for group in groups for line in group]),
        "right": mean([line["passed"] for group in groups for line in group]),
        "base": score["before"],
        "trained": score["after"],
    }


def groups_of(run: Path, step: int) -> list[list[dict]]:
    """Return the completions of a step by group."""
    lines = read_lines(run / f"completions/step-{step:05d}.jsonl")
    size = read_json(run / "run.json")["config"]["sampling"]["num_generations"]
    return [lines[start : start + size] for start in range(0, len(lines), size)]


def mixed(group: list[dict], number: int) -> float:
    """Return the probability that `number` completions drawn from a group are neither all right nor all wrong."""
    right = sum(line["passed"] for line in group)
    equal = math.comb(right, number) + math.comb(len(group) - right, number)
    return 1 - equal / math.comb(len(group), number)


def mean(values: list) -> float:
    return statistics.fmean(values) if values else math.nan


def table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each line and a column for each name in one of them."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    rows = [[show(line.get(name, "")) for name in columns] for line in lines]
    return "\n".join(markdown_table(columns, rows))


def show(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
