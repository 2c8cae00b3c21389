"""The pipeline that every recipe runs, one line per step.

parse -> data -> plan -> policy, sampler, trainer -> evaluate base -> train -> evaluate trained -> report
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from lora_grpo import console, distributed
from lora_grpo.audit import audit
from lora_grpo.cli import changed_settings, parse, run_command, user_files
from lora_grpo.commands import RECIPES, command, recipe_file
from lora_grpo.config import Overrides, typed_grpo_overrides
from lora_grpo.data import Data, fit_data, load_data, sft_command, split_validation, start_sandbox
from lora_grpo.evaluation import Result, evaluate, report_run
from lora_grpo.hardware import choose_engine
from lora_grpo.memory import Longest, complete_plan, draft_plan, make_plan, show_plan, summary
from lora_grpo.models import keep_start, load_policy, load_tokenizer
from lora_grpo.preview import dry_run, preview, show_settings
from lora_grpo.report import report_line
from lora_grpo.runs import Run, check_settings, open_run, read_metrics
from lora_grpo.sampling import build_sampler, check_server
from lora_grpo.tasks import CODE_TASKS, is_task_file
from lora_grpo.training import TimeBudget, filter_by_difficulty, make_trainer, train


def run_recipe(
    recipe: str, description: str, presets: Mapping[str, Overrides], method: Literal["grpo", "sft"] = "grpo"
) -> NoReturn:
    """Run a recipe with the command line of this process, and exit with the exit code of the recipe.

    Args:
        recipe: name of the recipe; the default output folder is `outputs/<recipe>`.
        description: the recipe's docstring, shown by `--help`.
        presets: changes to the defaults, by the name that `--preset` selects.
        method: `grpo`, or `sft` for supervised fine-tuning on the task's reference answers.
    """

    def main() -> None:
        config, invocation = parse(sys.argv[1:], recipe=recipe, description=description, presets=presets, method=method)
        if invocation.audit:
            start_sandbox(config.data, config.sandbox, config.eval.also)
            return audit(config, load_data(config))
        if invocation.resume:
            check_settings(config)
        changed = changed_settings(config, presets)
        if invocation.plan:
            return show_plan(make_plan(config, invocation)[1])
        draft = draft_plan(config, invocation)
        config = draft.config
        complete_plan(draft, Longest(rows=1, prompt=1, answered=1))  # refuse what never fits before it takes time
        if choose_engine(config) == "peft":  # Unsloth must be imported before TRL; its trainer checks this later
            typed_grpo_overrides(config.grpo)
        start_sandbox(config.data, config.sandbox, config.eval.also)
        data = load_data(config)
        if not (invocation.dry_run or invocation.preview):
            if not invocation.resume:
                audit(config, data, quick=True)
            entries = {"changed_settings": changed, "user_files": user_files(config)}
            run = open_run(config, invocation, recipe, data.record, entries)
        tokenizer = load_tokenizer(config, dry_run=invocation.dry_run, resumed=invocation.resume)
        data = fit_data(data, tokenizer, config)
        config, plan = complete_plan(draft, data.longest)
        if invocation.preview:
            return preview(config, data)
        console.note("\n".join(summary(plan)))
        if invocation.dry_run:
            show_settings(config)
            return dry_run(config, data, tokenizer)
        plan.check_disk()
        run.resolve(config, plan.record())
        train_and_evaluate(run, data)

    sys.exit(run_command(main))


def train_and_evaluate(run: Run, data: Data) -> None:
    """Train a run's adapter and compare it with the base. The rows fit the context."""
    config = run.config
    check_server(config)
    policy = load_policy(config, resumed=run.is_resumed)
    train_rows, validation_rows = split_validation(data.train, config)
    sampler = build_sampler(policy, config)
    budget = TimeBudget(run)
    trainer = make_trainer(run, policy, train_rows, sampler, validation_rows, budget)
    run.begin(policy.record)
    keep_start(run, policy.start)

    before = evaluate(run, sampler, data.eval, "base", data.also)
    budget.check_evaluation()
    rows = filter_by_difficulty(run, sampler, train_rows) if config.data.filter_by_difficulty else None
    train(run, policy, trainer, rows)
    after = evaluate(run, sampler, data.eval, "trained", data.also)
    finish_run(run, before, after)
    trainer.trackers.finish()


def finish_run(run: Run, before: Sequence[Result], after: Sequence[Result]) -> None:
    """Complete run.json, write the report, and print the results and the next steps.

    Args:
        before: the graded samples of the base.
        after: those of the trained model.
    """
    if not distributed.is_main():
        return
    report, joint = report_run(run, before, after)
    metric = "loss" if run.config.method == "sft" else "reward"
    # Steps that reuse rollouts, or in which no row could be graded, have no reward.
    lines = [line for line in read_metrics(run.folder) if line.get(metric) is not None]
    change = None
    if lines:
        change = {"first": lines[0][metric], "last": lines[-1][metric], "steps": lines[-1]["step"]}
    also = joint and joint.record
    run.finish({"table": [row.model_dump() for row in report.table], "also": also, metric: change})
    page = report_line(run.folder)  # before anything is printed, because the output pipe may be broken
    report.show()
    if change:
        console.result(f"{metric}: {change['first']:.2f} in step 1, {change['last']:.2f} in step {change['steps']}")
    else:
        console.result(f"{metric}: none, because every reward returned None for every completion")
    if best := run.record.get("best"):
        console.result(f"validation reward: {best['reward']:.2f} at its best, after step {best['step']}")
    console.result(f"\n{page}")
    for name, value in _next_steps(run, none_right=not any(result["passed"] for result in after)).items():
        console.result(f"{name:9} {value}")
    if joint:
        console.result()
        joint.show("What else changed")


def _next_steps(run: Run, *, none_right: bool) -> dict[str, Any]:
    """Return the paths of a run's files and the next commands, by a short name."""
    config, folder, hours = run.config, run.folder, run.config.hours
    task = config.data.evaluation_task
    named = ["--task", task] if is_task_file(task) else []
    trust = ["--trust-remote-code"] if config.model.trust_remote_code else []
    steps = {
        "adapter": run.adapter,
        **({"best": run.best} if run.record.get("best") else {}),
        "samples": f"{run.evaluation}/*.samples.jsonl",
        "evaluate": command("evaluate", folder, "--compare", "base", *named, *trust),
        "merge": command("merge", folder, *trust),
        "share": command("push", folder, "YOU/NAME", "--dry-run"),
    }
    same = "the same --model and --data flags"
    if none_right and config.method == "grpo":  # GRPO has nothing to reinforce
        sft, then = sft_command(config), "then this command with --lora.from outputs/sft_lora and another --output-dir"
        advice = f"train on reference answers first: {sft} with {same}, {then}" if sft else "train on easier rows"
        return steps | {"0% right": advice}
    if config.method == "sft" and not none_right:
        recipe = "train code" if task in CODE_TASKS else "train task" if named else "train gsm8k"
        if own := [name for name in RECIPES if named and recipe_file(name) == Path(task).resolve()]:
            recipe, named = f"train {own[0]}", []  # its default task
        preset = ["--preset", "laptop"] if config.preset == "laptop" else []
        steps["GRPO"] = f"{command(recipe, *preset, '--lora.from', folder, *named)} with {same}"
    # The flags that lift the limits that ended the run, or that a run twice as long would reach.
    flags = [] if run.out_of_time else [f"--train.max-steps {2 * config.train.max_steps}"]
    if run.stopped_early:
        flags = ["--monitor.early-stopping 0"]
    if hours and (run.out_of_time or 2 * run.seconds_worked > 3600 * hours):
        flags.append(f"--hours {2 * hours:g}")
    return steps | {"longer": f"the same command with --resume {' '.join(flags)}"}
