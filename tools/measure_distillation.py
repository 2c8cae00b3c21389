"""Measure on-policy distillation against GRPO and SFT with SmolLM2-135M, on a CPU (docs/distill.md).

    make laptop-model
    python tools/measure_distillation.py outputs/distillation --seeds 0 1 2
    python tools/measure_distillation.py outputs/distillation --recipe sql_lora --seeds 0 1 2
    python tools/measure_distillation.py outputs/distillation --runs sft grpo distilled

The runs of a seed, of which those above are needed by those below:

sft             SFT on reference answers
grpo            GRPO from `sft`: the teacher
distilled       from `sft`, the teacher alone, in half of the steps of `grpo`
distilled-kl    the same with the whole distribution, KL(model || teacher)
distilled-fast  the same in 8 steps of a quarter of the completions, with twice the learning rate after a warmup
both            from `sft`, the teacher beside the rewards, in the steps of `grpo`
both-half       the same in half of the steps
self            from `sft`, the model with `teacher_prompt(row)` as its teacher, in the steps of `grpo`
self-fast       the same in the steps of `distilled-fast`
sft-longer      SFT from `sft` on the same references, as many steps again

Finished runs and evaluations are kept, so a repeated command continues. Each adapter is evaluated once, on the held-out
rows of the recipe: with the samples of its preset, and greedily.

Columns: steps and their seconds; of them the seconds of the teacher; pass@1 and that of greedy answers on held-out rows
in percent, with 95% intervals; the difference in pass@1 against `sft` and against `grpo` in points, with p of a paired
test; pass@1 as a fraction of that of `grpo`; the planned and the measured peak of memory in GiB; and the KL to the
teacher of the first and the last step, in nats per token.
"""

import argparse
import runpy
import shlex
from pathlib import Path
from typing import Any

from measure_settings import read_json, read_lines, table
from results import ROOT, evaluate_once, run_once

from lora_grpo.evaluation import percent
from lora_grpo.evaluation.comparison import compare
from lora_grpo.evaluation.measurement import metrics
from lora_grpo.files import json_files

TEACHER = ("--teacher", "{folder}/grpo-{seed}")
ALONE = ("--teacher.reward-weight", "0")
SELF = ("--teacher", "self", *ALONE)
FROM_SFT = ("--lora.from", "{folder}/sft-{seed}")
HALF = ("--train.max-steps", "{half}")
FAST = shlex.split(
    "--sampling.num-generations 2 --train.max-steps 8 --train.learning-rate {twice}"
    " --train.lr-scheduler constant_with_warmup --train.warmup-steps 2"
)
RUNS: dict[str, tuple[str, ...]] = {
    "sft": (),
    "grpo": FROM_SFT,
    "distilled": (*FROM_SFT, *TEACHER, *ALONE, *HALF),
    "distilled-kl": (*FROM_SFT, *TEACHER, *ALONE, *HALF, "--teacher.loss", "reverse_kl"),
    "distilled-fast": (*FROM_SFT, *TEACHER, *ALONE, "--teacher.loss", "reverse_kl", *FAST),
    "both": (*FROM_SFT, *TEACHER),
    "both-half": (*FROM_SFT, *TEACHER, *HALF),
    "self": (*FROM_SFT, *SELF),
    "self-fast": (*FROM_SFT, *SELF, "--teacher.loss", "reverse_kl", *FAST),
    "sft-longer": FROM_SFT,
}
RECIPES = ("laptop_lora", "sql_lora")
EVALUATIONS = ("sampled", "greedy")
SHORT = ("--data.eval-limit", "16", "--eval.num-samples", "0", "--monitor.rows", "0")
"""Evaluations of the runs themselves, which are not those of the table."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", choices=RECIPES, default="laptop_lora")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--evaluations", nargs="+", choices=EVALUATIONS, default=list(EVALUATIONS))
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags for every run, the last ones")
    arguments = parser.parse_args()
    folder = (arguments.folder / arguments.recipe).resolve()
    folder.mkdir(parents=True, exist_ok=True)

    lines = []
    for seed in arguments.seeds:
        for name in arguments.runs:
            run = folder / f"{name}-{seed}"
            train(run, arguments.recipe, name, seed, arguments.flags)
            evaluate(run, arguments.recipe, seed, arguments.evaluations)
            lines.append({"run": name, "seed": seed, **columns_of(run), **comparisons(run, seed)})

    print(table(lines))


def laptop_preset_of(recipe: str) -> dict[str, Any]:
    """Return the settings that a recipe changes for SmolLM2, by section."""
    return runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"))["PRESETS"]["laptop"]


def train(run: Path, recipe: str, name: str, seed: int, more_flags: list[str]) -> None:
    """Train a run, or go on with it, unless it is complete."""
    script = f"recipes/{recipe}.py"
    grpo = laptop_preset_of(recipe)["train"]
    half, twice = grpo["max_steps"] // 2, 2 * grpo["learning_rate"]
    flags = [flag.format(folder=run.parent, seed=seed, half=half, twice=twice) for flag in RUNS[name]]
    if name.startswith("sft"):
        script = "recipes/sft_lora.py"
        flags += ["--task", f"recipes/{recipe}.py"]
    command = [script, "--preset", "laptop", *flags, "--seed", str(seed), *SHORT, *more_flags]
    print(run.name, *command, flush=True)
    run_once(shlex.join(command), run)


def evaluate(run: Path, recipe: str, seed: int, kinds: list[str]) -> None:
    """Evaluate a finished run: `sampled` as the recipe's preset says, or `greedy`. Go on with what was begun."""
    preset = laptop_preset_of(recipe)
    samples, temperature = preset["eval"]["num_samples"], preset["eval"].get("temperature", 1.0)
    flags = ["--task", f"recipes/{recipe}.py", "--limit", preset["data"]["eval_limit"], "--seed", seed, "--k", 1]
    how_of_kind = {"sampled": ["--num-samples", samples, "--temperature", temperature], "greedy": ["--temperature", 0]}
    for kind in kinds:
        evaluate_once(run, [str(word) for word in (*flags, *how_of_kind[kind])], run / kind)


def results_of(run: Path, kind: str) -> list[Any]:
    """Return the graded samples of a run: `sampled` or `greedy`. [] if they were not evaluated."""
    folder = run / kind
    return json_files.read_finished_lines(folder / "results.jsonl") if (folder / "report.json").is_file() else []


def comparisons(run: Path, seed: int) -> dict[str, str | float]:
    """Return the columns of a run's accuracy."""
    columns = {}
    for kind, name in (("sampled", "pass@1"), ("greedy", "greedy")):
        if results := results_of(run, kind):
            [metric, *_] = metrics(results, [1], seed).values()
            columns[name] = percent(metric.mean, metric.interval)
    after = results_of(run, "sampled")
    for other in ("sft", "grpo"):
        before = results_of(run.with_name(f"{other}-{seed}"), "sampled")
        if run.name != f"{other}-{seed}" and before and after:
            [change, *_] = compare(before, after, [1], seed)
            columns[f"against {other}"] = f"{100 * change.difference:+.1f}, {change.p_text}"
            if other == "grpo":
                columns["of grpo"] = change.after / max(1e-9, change.before)
    return columns


def columns_of(run: Path) -> dict[str, float]:
    """Return the columns of a finished run."""
    record = read_json(run / "run.json")
    steps = read_lines(run / "metrics.jsonl")
    columns = {
        "steps": len(steps),
        "seconds": sum(step["step_time"] for step in steps),
        "teacher": sum(step.get("time/teacher", 0.0) for step in steps),
        "plan": max(record["memory"]["planned_phases_gib"].values()),
        "peak": record["peak_memory_gib"],
    }
    kls = [step["teacher/kl"] for step in steps if "teacher/kl" in step]
    if kls:
        columns |= {"KL 1": kls[0], "KL": kls[-1]}
    return columns


if __name__ == "__main__":
    main()
