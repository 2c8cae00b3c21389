"""GSM8K with SmolLM2-135M on two CPU cores: SFT, GRPO, and the runs that show what GRPO's gain consists of.

    python tools/gsm8k_study.py gains                        # SFT and GRPO from it, three seeds, whole test set
    python tools/gsm8k_study.py controls                     # GRPO with other rewards, and more SFT instead
    python tools/gsm8k_study.py forgetting                   # other tasks before and after
    python tools/gsm8k_study.py plain                        # the same SFT and GRPO by a script with TRL alone
    python tools/gsm8k_study.py gains --seeds 0 --data ../gsm8k      # one seed, with files in place of the Hub

`--data` is a folder with GSM8K's train.jsonl and test.jsonl. The last 373 training rows are for validation: no run
trains on them, and all settings were chosen on them. The test set is for the tables alone.

A run of one seed takes hours, so everything is kept in outputs/gsm8k_study (`--output-dir`), and the same command goes
on where it stopped, also in the middle of a run or of an evaluation. Each model is evaluated once: greedily, and with
four samples per row at temperature 1. Tables compare two models row by row.

Accuracies are in percent with 95% intervals; minutes are those of training, without evaluations.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_step import environment
from results import evaluate_once, run_once

from lora_grpo.cli import run_command
from lora_grpo.config import LAPTOP_FOLDER
from lora_grpo.evaluation import percent
from lora_grpo.evaluation.comparison import Comparison, compare
from lora_grpo.evaluation.measurement import metrics
from lora_grpo.files import atomic, json_files
from lora_grpo.runs import read_metrics, read_record
from lora_grpo.tasks import get_task

ROOT = Path(__file__).resolve().parents[1]
VALIDATION_ROWS = 373
"""The last rows of the training set, about a twentieth."""
SAMPLES = 4
"""Samples per row at temperature 1."""
TRAIN_FLAGS = ("--data.eval-limit", "16", "--eval.num-samples", "0")
"""The tables have evaluations of their own, so those of the runs are short."""


@dataclass(frozen=True)
class Stage:
    """A run of a recipe."""

    title: str
    command: str
    start: str | None = None
    """The stage whose adapter the run continues from."""


BASE = "base"
STAGES = {
    "sft": Stage("SFT", "recipes/sft_lora.py --preset laptop"),
    "grpo": Stage("GRPO after SFT", "recipes/gsm8k_lora.py --preset laptop", "sft"),
    "random": Stage(
        "GRPO after SFT, random rewards", "recipes/gsm8k_lora.py --preset laptop --rewards coin_flip", "sft"
    ),
    "format": Stage(
        "GRPO after SFT, reward for the format alone",
        "recipes/gsm8k_lora.py --preset laptop --rewards 'pattern:#### -?[0-9]+$'",
        "sft",
    ),
    "more_sft": Stage("SFT after SFT, as many tokens", "recipes/sft_lora.py --preset laptop", "sft"),
}
PLAIN = {"trl_sft": "sft", "trl_grpo": "grpo"}
"""The same work by a script with TRL alone, tools/benchmark_step.py's side `plain`, by the stage that it copies."""


@dataclass(frozen=True)
class Study:
    """The runs of all seeds in one folder."""

    folder: Path
    data: str | None
    """Folder with train.jsonl and test.jsonl, or None for the Hub."""
    seeds: Sequence[int]

    def rows(self, split: str) -> Path:
        """Return the file of a split: `train`, `validation` or `test`."""
        path = self.folder / "data" / f"{split}.jsonl"
        if not path.exists():
            for name, rows in self._splits():
                atomic.write_text(self.folder / "data" / f"{name}.jsonl", json_files.dump_lines(rows))
        return path

    def _splits(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        files = {split: str(Path(self.data) / f"{split}.jsonl") if self.data else None for split in ("train", "test")}
        task = get_task("gsm8k")
        for split, file in files.items():
            loaded = task.load("train" if split == "train" else "eval", file)
            rows = [{name: row[name] for name in ("id", "question", "answer")} for row in loaded]
            if split == "train":
                yield "validation", rows[-VALIDATION_ROWS:]
                rows = rows[:-VALIDATION_ROWS]
            yield split, rows

    def model(self, stage: str, seed: int) -> Path:
        """Return the folder of a stage's run, or of the base. Train it unless it is finished."""
        if stage == BASE:
            return ROOT / LAPTOP_FOLDER
        if stage in PLAIN:
            return self._plain(stage, seed)
        folder = self.folder / f"{stage}-{seed}"
        run_once(shlex.join(self._command(stage, seed)), folder)
        return folder

    def _command(self, stage: str, seed: int) -> list[str]:
        """Return the command of a stage, or of the stage that a script with TRL copies."""
        plan = STAGES[PLAIN.get(stage, stage)]
        command = [*shlex.split(plan.command), *TRAIN_FLAGS, "--seed", str(seed)]
        command += ["--data.train", str(self.rows("train")), "--data.eval", str(self.rows("validation"))]
        if plan.start:
            start = "trl_sft" if stage in PLAIN else plan.start
            command += ["--lora.from", str(self.model(start, seed))]
        return command

    def _plain(self, stage: str, seed: int) -> Path:
        """Return the last checkpoint of TRL's trainer. An interrupted run of it starts over."""
        folder = self.folder / f"{stage}-{seed}"
        steps = folder / "steps.jsonl"
        if not (folder / "run.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            command = [*self._command(stage, seed), "--output-dir", str(folder)]
            execute("tools/benchmark_step.py", "--child", "plain", str(steps), *command)
            atomic.write_json(folder / "run.json", {"command": command})
        return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))

    def results(self, stage: str, seed: int, samples: int, split: str = "test", task: str = "gsm8k") -> list[Any]:
        """Return the graded samples of a model: one greedy sample for each row, or several at temperature 1."""
        model = self.model(stage, seed)
        name = f"{task}-{split}-{samples}-{seed}"
        folder = (self.folder / BASE if stage == BASE else model) / name
        flags = ["--task", task, "--num-samples", str(samples), "--k", "1", str(samples), "--seed", str(seed)]
        flags += ["--temperature", "0" if samples == 1 else "1", "--bits", "16"]
        if task == "gsm8k":
            flags += ["--data", str(self.rows(split)), "--style", "hashes", "--max-completion-tokens", "256"]
        return evaluate_once(model, flags, folder)


def execute(*command: str) -> None:
    """Run a script of this checkout, and show what it prints."""
    print(shlex.join(command), file=sys.stderr, flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment(ROOT), check=True)


def comparisons(study: Study, before: str, after: str, seed: int) -> dict[str, Comparison]:
    """Compare two stages of a seed on the test set: greedily, and by pass@1 and pass@4 at temperature 1."""
    [greedy] = compare(study.results(before, seed, 1), study.results(after, seed, 1), [1], seed)
    sampled = compare(study.results(before, seed, SAMPLES), study.results(after, seed, SAMPLES), [1, SAMPLES], seed)
    return {"greedy": greedy, **{each.metric: each for each in sampled}}


def gains(study: Study) -> list[list[str]]:
    """Return a row for each seed and metric: the base, after SFT, after GRPO, and what GRPO adds."""
    table = [["seed", "", "base", "after SFT", "after GRPO", "GRPO adds", "p", "minutes"]]
    for seed in study.seeds:
        sft = comparisons(study, BASE, "sft", seed)
        grpo = comparisons(study, "sft", "grpo", seed)
        minutes = " + ".join(f"{training_minutes(study.model(stage, seed)):.0f}" for stage in ("sft", "grpo"))
        for metric, change in grpo.items():
            first = metric == "greedy"
            base = percent(sft[metric].before, sft[metric].before_interval)
            table.append([str(seed) if first else "", metric, base, *change_cells(change), minutes if first else ""])
    return table


def controls(study: Study) -> list[list[str]]:
    """Return a row for each seed and control, losses first: what it changes of the model after SFT."""
    table = [["after SFT", "seed", "metric", "before", "after", "difference", "p", "minutes"]]
    changes = []
    for stage, plan in STAGES.items():
        if plan.start != "sft":
            continue
        for seed in study.seeds:
            minutes = f"{training_minutes(study.model(stage, seed)):.0f}"
            for metric, change in comparisons(study, "sft", stage, seed).items():
                cells = [plan.title, str(seed), metric, *change_cells(change), minutes]
                changes.append((change.difference, cells))
    return [*table, *(cells for _, cells in sorted(changes, key=lambda each: each[0]))]


FORGETTING = ("humaneval", "reasoning-gym:chain_sum", "reasoning-gym:spell_backward", "reasoning-gym:letter_counting")


def forgetting(study: Study) -> list[list[str]]:
    """Return a row for each seed and task, losses first: greedy answers of the base and after GRPO."""
    table = [["task", "seed", "base", "after SFT and GRPO", "difference", "p"]]
    changes = []
    for task in FORGETTING:
        for seed in study.seeds:
            samples = (study.results(stage, seed, 1, task=task) for stage in (BASE, "grpo"))
            [change] = compare(*samples, [1], seed)
            changes.append((change.difference, [task, str(seed), *change_cells(change)]))
    return [*table, *(cells for _, cells in sorted(changes, key=lambda each: each[0]))]


def plain(study: Study) -> list[list[str]]:
    """Return a row for each side and seed: minutes of the steps of SFT and of GRPO, and accuracy on the test set."""
    table = [["", "seed", "SFT, minutes", "GRPO, minutes", "greedy after SFT", "greedy after GRPO"]]
    ratios = []
    for seed in study.seeds:
        minutes = {}
        for side in ("TRL", "the kit"):
            stages = ("trl_sft", "trl_grpo") if side == "TRL" else ("sft", "grpo")
            minutes[side] = [step_minutes(study, stage, seed) for stage in stages]
            accuracy = []
            for stage in stages:
                [metric] = metrics(study.results(stage, seed, 1), [1], seed).values()
                accuracy.append(percent(metric.mean, metric.interval))
            table.append([side, str(seed), *(f"{value:.1f}" for value in minutes[side]), *accuracy])
        ratios.append([ours / theirs for ours, theirs in zip(minutes["the kit"], minutes["TRL"], strict=True)])
    for seed, ratio in zip(study.seeds, ratios, strict=True):
        table.append(["the kit / TRL", str(seed), *(f"{value:.2f}" for value in ratio), "", ""])
    return table


def step_minutes(study: Study, stage: str, seed: int) -> float:
    """Return the minutes of a stage's steps, without starts, checkpoints and evaluations."""
    folder = study.model(stage, seed)
    if stage in PLAIN:
        lines = json_files.read_finished_lines(folder.parent / "steps.jsonl", step=float)
        return sum(line["step"] for line in lines) / 60
    return sum(line["step_time"] for line in read_metrics(folder)) / 60


def change_cells(change: Comparison) -> list[str]:
    """Return the cells before, after, difference and p."""
    return [
        percent(change.before, change.before_interval),
        percent(change.after, change.after_interval),
        percent(change.difference, change.difference_interval, "+"),
        change.p_text,
    ]


def training_minutes(run: Path) -> float:
    """Return the minutes of a run without its evaluations, over all its processes."""
    record = read_record(run)
    seconds = record["seconds_worked"] - sum(record["evaluation_seconds"].values())
    return float(seconds / 60)


TABLES = {"gains": gains, "controls": controls, "forgetting": forgetting, "plain": plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data", help="folder with train.jsonl and test.jsonl of GSM8K (default: the Hub)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "gsm8k_study")
    options = parser.parse_args()
    study = Study(options.output_dir.resolve(), options.data, options.seeds)
    headings, *rows = TABLES[options.table](study)
    lines = [headings, ["---"] * len(headings), *rows]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    sys.exit(run_command(main))
