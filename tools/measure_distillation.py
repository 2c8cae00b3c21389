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
self            from `sft`, the model with `teacher_prompt(row)` as its teacher, in the steps of `grpo`
sft-longer      SFT from `sft` on the same references, as many steps again

Finished runs are kept, so a repeated command continues.

Columns: steps and their seconds, without evaluations; of them the seconds of the teacher; pass@1 on held-out rows
before and after, in percent, and that of greedy answers after; the pass@1 as a fraction of that of `grpo`; the planned
and the measured peak of memory in GiB; and the KL to the teacher of the first and the last step, in nats per token.
"""

import argparse
import runpy
import shlex
from pathlib import Path

from measure_settings import read_json, read_lines, show
from results import ROOT, run_once

TEACHER = ("--teacher", "{folder}/grpo-{seed}")
ALONE = ("--teacher.reward-weight", "0")
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
    "self": (*FROM_SFT, "--teacher", "self", *ALONE),
    "sft-longer": FROM_SFT,
}
RECIPES = ("laptop_lora", "sql_lora")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", choices=RECIPES, default="laptop_lora")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags for every run, the last ones")
    arguments = parser.parse_args()
    folder = (arguments.folder / arguments.recipe).resolve()
    folder.mkdir(parents=True, exist_ok=True)

    lines = []
    for seed in arguments.seeds:
        for name in arguments.runs:
            run = folder / f"{name}-{seed}"
            train(run, arguments.recipe, name, seed, arguments.flags)
            lines.append({"run": name, "seed": seed, **columns_of(run)})
    for line in lines:
        teacher = folder / f"grpo-{line['seed']}"
        if (teacher / "run.json").is_file():
            line["of GRPO"] = line["after"] / max(1e-9, columns_of(teacher)["after"])

    columns = list(dict.fromkeys(name for line in lines for name in line))
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for line in lines:
        print(f"| {' | '.join(show(line.get(name, '')) for name in columns)} |")


def train(run: Path, recipe: str, name: str, seed: int, more_flags: list[str]) -> None:
    """Train a run, or go on with it, unless it is complete."""
    script = f"recipes/{recipe}.py"
    grpo = runpy.run_path(str(ROOT / script))["PRESETS"]["laptop"]["train"]
    half, twice = grpo["max_steps"] // 2, 2 * grpo["learning_rate"]
    flags = [flag.format(folder=run.parent, seed=seed, half=half, twice=twice) for flag in RUNS[name]]
    if name.startswith("sft"):
        script = "recipes/sft_lora.py"
        flags += ["--task", f"recipes/{recipe}.py"]
    command = [script, "--preset", "laptop", *flags, "--seed", str(seed), "--monitor.rows", "0", *more_flags]
    print(run.name, *command, flush=True)
    run_once(shlex.join(command), run)


def columns_of(run: Path) -> dict[str, float]:
    """Return the columns of a finished run."""
    record = read_json(run / "run.json")
    steps = read_lines(run / "metrics.jsonl")
    score_by_metric = {row["metric"]: row for row in record["results"]["table"]}
    score = score_by_metric["pass@1"]
    columns = {
        "steps": len(steps),
        "seconds": sum(step["step_time"] for step in steps),
        "teacher": sum(step.get("time/teacher", 0.0) for step in steps),
        "before": 100 * score["before"],
        "after": 100 * score["after"],
        "greedy": 100 * score_by_metric["greedy"]["after"],
        "plan": max(record["memory"]["planned_phases_gib"].values()),
        "peak": record["peak_memory_gib"],
    }
    kls = [step["teacher/kl"] for step in steps if "teacher/kl" in step]
    if kls:
        columns |= {"KL 1": kls[0], "KL": kls[-1]}
    return columns


if __name__ == "__main__":
    main()
