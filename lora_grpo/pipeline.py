"""What every recipe does, one line per step: the command line of a recipe, and `train` of the Python API.

settings -> data -> plan -> policy, sampler, trainer -> evaluate base -> train -> evaluate trained -> report

`run_recipe` parses the command line and exits. Everything below it raises UserError or RunError.
"""

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from lora_grpo import console
from lora_grpo.audit import Findings, audit, refuse_problems
from lora_grpo.cli import parse, run_command
from lora_grpo.commands import RECIPES, command, recipe_file
from lora_grpo.config import ConfigChanges, Invocation, RunConfig, typed_grpo_overrides
from lora_grpo.data import Data, fit_data, load_data, sft_command, split_validation, start_sandbox
from lora_grpo.evaluation import Result, evaluate, report_run
from lora_grpo.hardware import choose_engine
from lora_grpo.memory import Plan, RowLengths, complete_plan, draft_plan, engine_line, make_plan, show_plan, summary
from lora_grpo.models import (
    Teacher,
    check_teacher_tokenizer,
    find_teacher,
    keep_start,
    load_policy,
    load_tokenizer,
    model_files,
)
from lora_grpo.monitoring import TimeBudget
from lora_grpo.preview import Preview, dry_run, preview, show_settings
from lora_grpo.report import report_line
from lora_grpo.runs import Run, check_settings, claim_run, open_run, read_metrics, read_record, resumes
from lora_grpo.sampling import build_sampler, check_server
from lora_grpo.settings import Recipe, changed_settings, user_files, user_objects
from lora_grpo.tasks import CODE_TASKS, is_task_file
from lora_grpo.training import check_teacher_loss, filter_by_difficulty, prepare_training, train


def run_recipe(
    recipe: str, description: str, presets: Mapping[str, ConfigChanges], method: Literal["grpo", "sft"] = "grpo"
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
        definition = Recipe(recipe, presets, method)
        if invocation.audit:
            refuse_problems(audit_run(config))
        elif invocation.plan:
            show_plan(plan_run(config, invocation))
        elif invocation.preview:
            preview_run(config, invocation)
        elif invocation.dry_run:
            dry_run_of(config, invocation)
        else:
            train_run(config, invocation, definition)

    sys.exit(run_command(main))


def train_run(
    config: RunConfig,
    invocation: Invocation,
    recipe: Recipe,
    callbacks: Sequence[Any] = (),
    resources: contextlib.ExitStack | None = None,
) -> Run:
    """Train an adapter in a new or resumed run folder, evaluate the model before and after, and write the report.

    Args:
        callbacks: of transformers' Trainer, for the trainer of the run.
        resources: gets the engine, to close it. By default it ends with the process.

    Raises:
        UserError: a setting, a row or a file is wrong. The folder is as it was.
        RunError: the run has failed. With `invocation.resume`, it continues from its last checkpoint.
    """
    begun = None
    is_resumed = resumes(config.folder, invocation)
    if is_resumed:
        check_settings(config)
        begun = read_record(config.folder)
    claim_run(config, invocation)
    draft = _draft(config, invocation)
    changed = changed_settings(config, recipe.presets, begun)
    entries: dict[str, Any] = {
        "changed_settings": {name: value for name, value in changed.items() if name not in draft.derived}
    }
    config = draft.config

    data = load_data(config)
    if not is_resumed:
        audit(config, data, quick=True)
    entries["user_files"] = user_files(config)
    if objects := user_objects(config):
        entries["python_objects"] = objects
    run = open_run(config, invocation, recipe.name, data.record, entries)

    # Plan with the lengths of the rows.
    tokenizer = load_tokenizer(config, resumed=is_resumed)
    teacher = _checked_teacher(config, tokenizer, resumed=is_resumed)
    data = fit_data(data, tokenizer, config)
    config, plan = complete_plan(draft, data.row_lengths)
    console.note("\n".join(summary(plan)))
    plan.check_disk()
    run.resolve(config, plan.record())

    if teacher and teacher.base:  # downloaded before the GPU holds the model
        model_files.locate(teacher.base.name, teacher.base.revision)
    train_and_evaluate(run, data, callbacks, resources)
    return run


def plan_run(config: RunConfig, invocation: Invocation) -> Plan:
    """Return the plan of a run: memory, settings that fit, and work. Loads neither weights nor data."""
    if invocation.resume:
        check_settings(config)
    _, plan = make_plan(config, invocation)
    return plan


def audit_run(config: RunConfig) -> dict[str, Findings]:
    """Attack the graders of a run's tasks, and return the findings by task; see `audit`."""
    start_sandbox(config.data, config.sandbox, config.eval.also)
    return audit(config, load_data(config))


def preview_run(config: RunConfig, invocation: Invocation) -> Preview:
    """Sample the base model on 8 prompts, and judge whether GRPO can learn from the rewards."""
    prepared = _prepare_without_folder(config, invocation)
    if prepared.plan.measured or prepared.plan.not_fitting:
        console.note(engine_line(prepared.plan))
    return preview(prepared.config, prepared.data)


def dry_run_of(config: RunConfig, invocation: Invocation) -> None:
    """Tell the settings, one prompt, and the rewards of its reference answer."""
    if invocation.resume:
        check_settings(config)
    prepared = _prepare_without_folder(config, invocation)
    console.note("\n".join(summary(prepared.plan)))
    show_settings(prepared.config)
    dry_run(prepared.config, prepared.data, prepared.tokenizer)


@dataclass(frozen=True)
class _Prepared:
    """What a run would train with."""

    config: RunConfig
    plan: Plan
    data: Data
    """The rows that fit the context."""
    tokenizer: Any


def _prepare_without_folder(config: RunConfig, invocation: Invocation) -> _Prepared:
    """Load the data and plan as a run does, but without a folder."""
    is_resumed = resumes(config.folder, invocation)
    draft = _draft(config, invocation)
    data = load_data(draft.config)
    tokenizer = load_tokenizer(draft.config, dry_run=invocation.dry_run, resumed=is_resumed)
    _checked_teacher(draft.config, tokenizer, resumed=is_resumed)
    data = fit_data(data, tokenizer, draft.config)
    config, plan = complete_plan(draft, data.row_lengths)
    return _Prepared(config, plan, data, tokenizer)


def _checked_teacher(config: RunConfig, tokenizer: Any, *, resumed: bool) -> Teacher | None:
    """Return the run's teacher; None without one.

    Raises:
        UserError: it has another tokenizer than the model, or TRL lacks its loss.
    """
    check_teacher_loss(config.teacher)
    teacher = find_teacher(config, resumed=resumed)
    if teacher:
        check_teacher_tokenizer(teacher, tokenizer)
    return teacher


def _draft(config: RunConfig, invocation: Invocation) -> Plan:
    """Return the plan of a run without its memory, and start the sandbox if programs are graded.

    Raises:
        UserError: the model cannot be trained, never fits, or TRL does not know a setting.
    """
    draft = draft_plan(config, invocation)
    # Refuse what never fits, even with a row of one token, before anything takes time.
    complete_plan(draft, RowLengths(rows=1, longest_prompt=1, longest_answered=1))
    config = draft.config
    if choose_engine(config) == "peft":  # Unsloth must be imported before TRL; its trainer checks this later
        typed_grpo_overrides(config.grpo)
    start_sandbox(config.data, config.sandbox, config.eval.also)
    return draft


def train_and_evaluate(
    run: Run, data: Data, callbacks: Sequence[Any] = (), resources: contextlib.ExitStack | None = None
) -> None:
    """Train a run's adapter and compare it with the base. The rows fit the context."""
    from lora_grpo import agents  # not needed by other commands, whose start it would delay

    config = run.config
    check_server(config)
    agents.keep_logs_in(run.folder)
    policy = load_policy(config, resumed=run.is_resumed)
    train_rows, validation_rows = split_validation(data.train, config)
    sampler = build_sampler(policy, config)
    if resources:
        resources.callback(sampler.close)
    budget = TimeBudget(run)
    training = prepare_training(run, policy, train_rows, sampler, validation_rows, budget)
    for callback in callbacks:
        training.trainer.add_callback(callback)
    run.begin(policy.record)
    run.once(lambda: keep_start(run, policy.start))

    before = evaluate(run, sampler, data.eval, "base", data.also)
    budget.check_evaluation()
    rows = None
    if config.data.filter_by_difficulty:
        rows = filter_by_difficulty(run, sampler, train_rows)
    train(training, rows)
    after = evaluate(run, sampler, data.eval, "trained", data.also)
    run.once(lambda: finish_run(run, before, after))
    run.once(training.trackers.finish)


def finish_run(run: Run, before: Sequence[Result], after: Sequence[Result]) -> None:
    """Complete run.json, write the report, and tell the results and the next steps.

    Args:
        before: the graded samples of the base.
        after: those of the trained model.
    """
    reports = report_run(run, before, after)
    metric = "loss" if run.config.method == "sft" else "reward"
    # Steps that reuse rollouts, or in which no row could be graded, have no reward. A loss may be NaN.
    steps = [line for line in read_metrics(run.folder) if _is_finite(line.get(metric))]
    change = None
    if steps:
        change = {"first": steps[0][metric], "last": steps[-1][metric], "steps": steps[-1]["step"]}
    table = [row.model_dump() for row in reports.report.table]
    also = None
    if reports.also:
        also = reports.also.record
    run.finish({"table": table, "also": also, metric: change})
    page = report_line(run.folder)  # before anything is printed, because the output pipe may be broken

    reports.report.show()
    if change:
        console.result(f"{metric}: {change['first']:.2f} in step 1, {change['last']:.2f} in step {change['steps']}")
    elif metric == "loss":
        console.result("loss: none that is finite")
    else:
        console.result("reward: none, because every reward returned None for every completion")
    if best := run.record.get("best"):
        console.result(f"validation reward: {best['reward']:.2f} at its best, after step {best['step']}")
    console.result(f"\n{page}")
    passes_any = any(result["passed"] for result in after)
    for name, value in _next_steps(run, passes_any=passes_any).items():
        console.result(f"{name:9} {value}")
    if reports.also:
        console.result()
        reports.also.show("What else changed")


def _is_finite(value: float | None) -> bool:
    """Return whether a metric has a value that run.json can hold."""
    return value is not None and math.isfinite(value)


def _next_steps(run: Run, *, passes_any: bool) -> dict[str, Any]:
    """Return the paths of a run's files and the next commands, by a short name.

    Args:
        passes_any: whether the trained model has solved any problem.
    """
    config = run.config
    folder = run.folder
    task = config.data.evaluation_task
    task_flags = ["--task", task] if is_task_file(task) else []
    trust = ["--trust-remote-code"] if config.model.trust_remote_code else []
    steps: dict[str, Any] = {"adapter": run.adapter}
    if run.record.get("best"):
        steps["best"] = run.best
    steps["samples"] = f"{run.evaluation}/*.samples.jsonl"
    steps["evaluate"] = command("evaluate", folder, "--compare", "base", *task_flags, *trust)
    steps["merge"] = command("merge", folder, *trust)
    steps["share"] = command("push", folder, "YOU/NAME", "--dry-run")

    same_flags = "the same --model and --data flags"
    if config.method == "grpo" and not passes_any:  # GRPO has nothing to reinforce
        sft = sft_command(config)
        steps["0% right"] = "train on easier rows"
        if sft:
            steps["0% right"] = (
                f"train on reference answers first: {sft} with {same_flags}, then this command with another "
                "--output-dir and with --lora.from and the folder of that run"
            )
        return steps
    if config.method == "sft" and passes_any:
        steps["GRPO"] = f"{_grpo_command(config, task_flags)} with {same_flags}"

    # The flags that lift the limits that ended the run, or that a run twice as long would reach.
    flags = []
    if run.stopped_early_at:
        flags.append("--monitor.early-stopping 0")
    elif not run.out_of_time_at:
        if config.train.schedule_spans_run:
            return steps
        flags.append(f"--train.max-steps {2 * config.train.max_steps}")
    hours = config.hours
    if hours and (run.out_of_time_at or 2 * run.seconds_worked > 3600 * hours):
        flags.append(f"--hours {2 * hours:g}")
    steps["longer"] = f"the same command with --resume {' '.join(flags)}"
    return steps


def _grpo_command(config: RunConfig, task_flags: Sequence[str]) -> str:
    """Return the command that continues an SFT run with GRPO."""
    task = config.data.evaluation_task
    preset = ["--preset", "laptop"] if config.preset == "laptop" else []
    start = ["--lora.from", config.folder]
    if not task_flags:
        recipe = "code" if task in CODE_TASKS else "gsm8k"
        return command(f"train {recipe}", *preset, *start)
    for recipe in RECIPES:
        if recipe_file(recipe) == Path(task).resolve():  # its default task
            return command(f"train {recipe}", *preset, *start)
    return command("train task", *preset, *start, *task_flags)
