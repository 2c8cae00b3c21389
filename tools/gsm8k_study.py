"""GSM8K with SmolLM2-135M on two CPU cores: SFT, GRPO, and the runs that show what GRPO's gain consists of.

    make laptop-model
    python tools/gsm8k_study.py gains                        # SFT and GRPO from it, three seeds, whole test set
    python tools/gsm8k_study.py controls                     # GRPO with other rewards, and more SFT instead
    python tools/gsm8k_study.py forgetting                   # other tasks before and after
    python tools/gsm8k_study.py plain                        # the same SFT and GRPO by a script with TRL alone
    python tools/gsm8k_study.py gains --seeds 0 --data ../gsm8k      # one seed, with files in place of the Hub

`--data` is a folder with GSM8K's train.jsonl and test.jsonl, and `--humaneval` the file of HumanEval. The last 373
training rows are for validation: no run trains on them, and all settings were chosen on them. The test set is for the
tables alone. `--grpo-steps` shortens GRPO, and with it the controls that are compared with it. `--samples 0` leaves the
evaluations with several samples for later, which take as long as GRPO.

A run of one seed takes hours, so everything is kept in outputs/gsm8k_study (`--output-dir`), and the same command goes
on where it stopped, also in the middle of a run or of an evaluation. A folder of runs with other rows or settings is
refused. Each model is evaluated once: greedily, and with four samples per row at temperature 1 (`--samples`).

Tables compare two models row by row. Accuracies are in percent with 95% intervals. The p-values of a table are
adjusted for their number (Holm). Minutes are those of training, without evaluations.
"""

import argparse
import functools
import json
import os
import runpy
import shlex
import shutil
import statistics
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
from lora_grpo.errors import UserError
from lora_grpo.evaluation import percent
from lora_grpo.evaluation.comparison import Comparison, compare, p_text
from lora_grpo.evaluation.measurement import metrics
from lora_grpo.evaluation.pass_at_k import holm
from lora_grpo.files import atomic, json_files, lock, markdown_table
from lora_grpo.runs import read_metrics, read_record
from lora_grpo.runs.checkpoints import checkpoints_in, newest_step
from lora_grpo.tasks import get_task

ROOT = Path(__file__).resolve().parents[1]
VALIDATION_ROWS = 373
"""The last rows of the training set, about a twentieth."""
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
SFT = "recipes/sft_lora.py --preset laptop"
GRPO = "recipes/gsm8k_lora.py --preset laptop"
STAGES = {
    "sft": Stage("SFT", SFT),
    "grpo": Stage("GRPO", GRPO, "sft"),
    "correct": Stage("GRPO, right answers alone", f"{GRPO} --rewards correct_answer", "sft"),
    "equations": Stage("GRPO, right equations alone", f"{GRPO} --rewards right_equations", "sft"),
    "format": Stage("GRPO, format alone", f"{GRPO} --rewards 'pattern:#### -?[0-9]+$'", "sft"),
    "random": Stage("GRPO, random rewards", f"{GRPO} --rewards coin_flip", "sft"),
    "more_sft": Stage("SFT on other rows, as many tokens as GRPO", SFT, "sft"),
}
PLAIN = {"trl_sft": "sft", "trl_grpo": "grpo"}
"""The same work by a script with TRL alone, tools/benchmark_step.py's side `plain`, by the stage that it copies."""
PLAIN_FLAGS = ("--train.checkpoint-steps", "2")
"""A step of TRL's takes minutes."""
FORGETTING = ("humaneval", "reasoning-gym:chain_sum", "reasoning-gym:spell_backward", "reasoning-gym:letter_counting")
LENGTHS = {"gsm8k": 256, "humaneval": 384}
"""Maximum tokens of an answer, by task; of others, 256."""
OTHER_ROWS = 1000
"""Added to the seed of more SFT, which would see the rows of the first SFT again."""


@dataclass(frozen=True)
class Study:
    """The runs of all seeds in one folder."""

    folder: Path
    data: Path | None
    """Folder with train.jsonl and test.jsonl, or None for the Hub."""
    humaneval: Path | None
    """HumanEval's file, or None for the Hub."""
    seeds: Sequence[int]
    grpo_steps: int | None = None
    """Steps of GRPO, or None for those of the preset."""
    samples: int = 4
    """Samples per row at temperature 1. With 0, answers are greedy ones alone."""

    def begin(self) -> None:
        """Write the rows, and what all runs of the folder have in common, or compare it with what is there.

        Raises:
            UserError: the laptop model is missing, or the folder has other rows, settings or commands.
        """
        if not (ROOT / LAPTOP_FOLDER / "config.json").is_file():
            raise UserError(f"{LAPTOP_FOLDER} does not exist; run `make laptop-model`")
        presets = {recipe: runpy.run_path(recipe.split()[0])["PRESETS"]["laptop"] for recipe in (SFT, GRPO)}
        commands = {name: stage.command for name, stage in STAGES.items()}
        self._keep("study.json", json.dumps({"presets": presets, "commands": commands}, indent=2))
        for name, rows in self._splits():
            self._keep(f"data/{name}.jsonl", json_files.dump_lines(rows))

    def _keep(self, name: str, text: str) -> None:
        path = self.folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, text)
        elif path.read_text(encoding="utf-8") != text:
            raise UserError(f"{path} differs from what this command needs; pass another --output-dir")

    def _splits(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        files = {split: str(self.data / f"{split}.jsonl") if self.data else None for split in ("train", "test")}
        task = get_task("gsm8k")
        for split, file in files.items():
            loaded = task.load("train" if split == "train" else "eval", file)
            rows = [{name: row[name] for name in ("id", "question", "answer")} for row in loaded]
            if split == "train":
                yield "validation", rows[-VALIDATION_ROWS:]
                rows = rows[:-VALIDATION_ROWS]
            yield split, rows

    def rows(self, split: str) -> Path:
        """Return the file of a split: `train`, `validation` or `test`."""
        return self.folder / "data" / f"{split}.jsonl"

    def model(self, stage: str, seed: int) -> Path:
        """Return the folder of a stage's run, or of the base. Train it unless it is finished."""
        if stage == BASE:
            return ROOT / LAPTOP_FOLDER
        if stage in PLAIN:
            return self._plain(stage, seed)
        folder = self._run(stage, seed)
        run_once(shlex.join(self._command(stage, seed)), folder)
        return folder

    def _run(self, stage: str, seed: int) -> Path:
        """Return the folder of a stage's run. That of a shorter GRPO, or of its control, is another one."""
        is_shorter = self.grpo_steps and stage not in ("sft", "trl_sft")
        return self.folder / (f"{stage}-{self.grpo_steps}-{seed}" if is_shorter else f"{stage}-{seed}")

    def _command(self, stage: str, seed: int) -> list[str]:
        """Return the command of a stage, or of the stage that a script with TRL copies."""
        plan = STAGES[PLAIN.get(stage, stage)]
        command = [*shlex.split(plan.command), *TRAIN_FLAGS]
        command += ["--data.train", str(self.rows("train")), "--data.eval", str(self.rows("validation"))]
        if plan.start:
            start = "trl_sft" if stage in PLAIN else plan.start
            command += ["--lora.from", str(self.model(start, seed))]
        if stage == "more_sft":
            return [*command, "--seed", str(seed + OTHER_ROWS), "--train.max-steps", str(self._steps_of_sft(seed))]
        if plan.command.startswith(GRPO) and self.grpo_steps:
            command += ["--train.max-steps", str(self.grpo_steps)]
        return [*command, "--seed", str(seed)]

    def _steps_of_sft(self, seed: int) -> int:
        """Return the steps in which SFT trains on as many tokens of answers as GRPO of the same seed did."""
        grpo = self.model("grpo", seed)
        config = read_record(grpo)["config"]
        completions_per_step = config["sampling"]["num_generations"] * config["train"]["prompts_per_step"]
        sampled = completions_per_step * sum(line["completions/mean_length"] for line in read_metrics(grpo))

        references_per_step = read_record(self.model("sft", seed))["config"]["train"]["prompts_per_step"]
        tokens_per_step = references_per_step * mean_reference_tokens(self.model(BASE, seed), self.rows("train"))
        return round(sampled / tokens_per_step)

    def _plain(self, stage: str, seed: int) -> Path:
        """Return the last checkpoint of TRL's trainer. An interrupted run goes on from its last checkpoint."""
        folder = self._run(stage, seed)
        if not (folder / "finished.json").exists():
            command = [*self._command(stage, seed), *PLAIN_FLAGS, "--output-dir", str(folder)]
            if lock.is_held(folder):  # by a trainer whose study was killed
                raise UserError(f"another process is using {folder}; wait for it or end it")
            folder.mkdir(parents=True, exist_ok=True)
            steps = folder / "steps.jsonl"
            discard_unfinished(folder, steps)
            execute("tools/benchmark_step.py", "--child", "plain", str(steps), *command)
            atomic.write_json(folder / "finished.json", {"command": command})
        return checkpoints_in(folder)[0].path

    def results(self, stage: str, seed: int, samples: int, task: str = "gsm8k") -> list[Any]:
        """Return the graded samples of a model: one greedy sample for each row, or several at temperature 1."""
        if stage == BASE or samples == 1:
            seed_of_samples = 0  # the base has no seed, and greedy answers need none
        else:
            seed_of_samples = seed
        model = self.model(stage, seed)
        flags = ["--task", task, "--num-samples", str(samples), "--k", "1", str(samples)]
        flags += ["--seed", str(seed_of_samples), "--temperature", "0" if samples == 1 else "1", "--bits", "16"]
        # Settings that a run would otherwise give to its adapter, and not to the base.
        flags += ["--max-completion-tokens", str(LENGTHS.get(task, 256)), "--few-shot", "0"]
        if task == "humaneval":
            flags += ["--data", str(self.humaneval)] if self.humaneval else []
        else:
            flags += ["--style", "hashes"]
        if task == "gsm8k":
            flags += ["--data", str(self.rows("test"))]
        name = f"{task.replace(':', '-')}-{samples}"
        return evaluate_once(model, flags, (self.folder / BASE if stage == BASE else model) / name)


def discard_unfinished(folder: Path, steps: Path) -> None:
    """Delete checkpoints of TRL's trainer that are incomplete, and the lines of steps after the last complete one."""
    for checkpoint in checkpoints_in(folder):
        if not (checkpoint.path / "trainer_state.json").exists():  # which is written last
            shutil.rmtree(checkpoint.path)
    lines = json_files.read_finished_lines(steps)
    atomic.write_text(steps, json_files.dump_lines(lines[: newest_step(folder)]))


@functools.cache
def mean_reference_tokens(model: Path, rows: Path) -> float:
    """Return the mean number of tokens of the reference answers of a file, with the EOS token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    task = get_task("gsm8k")
    references = [task.gold(row) for row in json_files.read_finished_lines(rows)]
    return 1 + statistics.fmean(len(ids) for ids in tokenizer(references)["input_ids"])


def execute(*command: str) -> None:
    """Run a script of this checkout, and show what it prints."""
    print(shlex.join(command), file=sys.stderr, flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment(ROOT), check=True)


Cells = list[str]


def comparisons(study: Study, before: str, after: str, seed: int) -> dict[str, Comparison]:
    """Compare two stages of a seed on the test set: greedily, and by pass@1 and pass@4 at temperature 1."""
    [greedy] = compare(study.results(before, seed, 1), study.results(after, seed, 1), [1], seed)
    if not study.samples:
        return {"greedy": greedy}
    samples_before, samples_after = (study.results(stage, seed, study.samples) for stage in (before, after))
    sampled = compare(samples_before, samples_after, [1, study.samples], seed)
    return {"greedy": greedy, **{each.metric: each for each in sampled}}


def gains(study: Study) -> list[Cells]:
    """Return a row for each seed and metric: the base, after SFT, after GRPO, and what GRPO adds."""
    table = [["seed", "metric", "base", "after SFT", "after GRPO", "GRPO adds", "p", "minutes"]]
    sft = {seed: comparisons(study, BASE, "sft", seed) for seed in study.seeds}
    grpo = {seed: comparisons(study, "sft", "grpo", seed) for seed in study.seeds}
    adjusted = iter(holm([change.p_value for of_seed in grpo.values() for change in of_seed.values()]))
    for seed, of_seed in grpo.items():
        minutes = " + ".join(f"{training_minutes(study.model(stage, seed)):.0f}" for stage in ("sft", "grpo"))
        for metric, change in of_seed.items():
            base = sft[seed][metric]
            cells = [percent(base.before, base.before_interval), *change_cells(change)]
            table.append([str(seed), metric, *cells, p_text(next(adjusted)), minutes])
    for metric in grpo[study.seeds[0]]:
        changes = [of_seed[metric] for of_seed in grpo.values()]
        base = [of_seed[metric].before for of_seed in sft.values()]
        before, after = [change.before for change in changes], [change.after for change in changes]
        differences = [change.difference for change in changes]
        table.append(["all", metric, *map(mean_and_range, (base, before, after, differences)), "", ""])
    return table


def controls(study: Study) -> list[Cells]:
    """Return a row for each run after SFT, seed and metric, losses first: its change, and GRPO's change against it."""
    table = [["after SFT", "seed", "metric", "before", "after", "difference", "p", "GRPO against it", "p", "minutes"]]
    rows: list[tuple[str, int, str, Comparison, Comparison]] = []
    for stage, plan in STAGES.items():
        if plan.start is None or stage == "grpo":
            continue
        for seed in study.seeds:
            changes = comparisons(study, "sft", stage, seed)
            against = comparisons(study, stage, "grpo", seed)
            rows += [(stage, seed, metric, change, against[metric]) for metric, change in changes.items()]
    adjusted = holm([row[3].p_value for row in rows]), holm([row[4].p_value for row in rows])
    lines = []
    for (stage, seed, metric, change, against), p_change, p_against in zip(rows, *adjusted, strict=True):
        minutes = f"{training_minutes(study.model(stage, seed)):.0f}"
        more = percent(against.difference, against.difference_interval, "+")
        cells = [*change_cells(change), p_text(p_change), more, p_text(p_against), minutes]
        lines.append((change.difference, [STAGES[stage].title, str(seed), metric, *cells]))
    return [*table, *losses_first(lines)]


def forgetting(study: Study) -> list[Cells]:
    """Return a row for each seed and task, losses first: greedy answers of the base and after GRPO."""
    table = [["task", "seed", "metric", "base", "after SFT and GRPO", "difference", "p"]]
    rows: list[tuple[str, int, Comparison]] = []
    for task in FORGETTING:
        for seed in study.seeds:
            before, after = (study.results(stage, seed, 1, task) for stage in (BASE, "grpo"))
            rows += [(task, seed, change) for change in compare(before, after, [1], seed)]
    adjusted = holm([change.p_value for _, _, change in rows])
    lines = []
    for (task, seed, change), p_value in zip(rows, adjusted, strict=True):
        cells = [task, str(seed), change.metric, *change_cells(change), p_text(p_value)]
        lines.append((change.difference, cells))
    return [*table, *losses_first(lines)]


def losses_first(rows: list[tuple[float, Cells]]) -> list[Cells]:
    """Return the cells of rows in the order of their differences."""
    return [cells for _, cells in sorted(rows, key=lambda row: row[0])]


def plain(study: Study) -> list[Cells]:
    """Return a row for each side and seed: minutes of the steps of SFT and of GRPO, and accuracy on the test set.

    Each side continues from its own SFT.
    """
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
    """Return the minutes of a stage's steps, without starts, checkpoints and evaluations.

    Those of TRL include the optimizer's update of the adapter, which the kit does not time.
    """
    folder = study.model(stage, seed)
    if stage in PLAIN:
        lines = json_files.read_finished_lines(folder.parent / "steps.jsonl", step=float)
        return sum(line["step"] for line in lines) / 60
    return sum(line["step_time"] for line in read_metrics(folder)) / 60


def change_cells(change: Comparison) -> Cells:
    """Return the cells before, after and difference."""
    return [
        percent(change.before, change.before_interval),
        percent(change.after, change.after_interval),
        percent(change.difference, change.difference_interval, "+"),
    ]


def mean_and_range(fractions: Sequence[float]) -> str:
    """Return the mean over seeds in percent, with the lowest and the highest value."""
    mean = statistics.fmean(fractions)
    return f"{100 * mean:.1f} ({100 * min(fractions):.1f} to {100 * max(fractions):.1f})"


def training_minutes(run: Path) -> float:
    """Return the minutes of a run without its evaluations, over all its processes."""
    record = read_record(run)
    seconds = record["seconds_worked"] - sum(record["evaluation_seconds"].values())
    return float(seconds / 60)


TABLES = {"gains": gains, "controls": controls, "forgetting": forgetting, "plain": plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl of GSM8K (default: the Hub)")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz (default: the Hub)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--grpo-steps", type=int, help="steps of GRPO and its controls (default: the preset's)")
    parser.add_argument("--samples", type=int, default=4, help="samples per row at temperature 1, or 0 (default: 4)")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs" / "gsm8k_study")
    options = parser.parse_args()
    if options.samples == 1:
        parser.error("--samples 1: pass 0 for greedy answers alone, or at least 2 samples")
    data, humaneval = (path and path.resolve() for path in (options.data, options.humaneval))
    study = Study(options.output_dir.resolve(), data, humaneval, options.seeds, options.grpo_steps, options.samples)
    os.chdir(ROOT)  # where the recipes look for the laptop model
    study.begin()
    headings, *rows = TABLES[options.table](study)
    print("\n".join(markdown_table(headings, rows)))


if __name__ == "__main__":
    sys.exit(run_command(main))
