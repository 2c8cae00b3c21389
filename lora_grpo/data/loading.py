"""Load the rows of a run: training and evaluation rows that share no problem, with their prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_grpo import console, sandbox
from lora_grpo.config import DataConfig, RunConfig
from lora_grpo.data.duplicates import unique_rows, without_problems_of
from lora_grpo.data.fingerprints import fingerprint
from lora_grpo.data.split_rows import load_split
from lora_grpo.errors import UserError
from lora_grpo.grading import Row, solvable
from lora_grpo.memory import RowLengths
from lora_grpo.prompts import add_prompts
from lora_grpo.tasks import (
    CODE_TASKS,
    TaskFile,
    get_task,
    has_conversations,
    is_task_file,
    runs_programs,
    source_of_rows,
    sources,
    task_title,
)

# Tasks whose reference programs are checked. The starter's need no check, because the test suite runs them.
_CHECKED_TASKS = [name for name in CODE_TASKS if name.startswith(("humaneval", "mbpp"))]


@dataclass(frozen=True)
class Data:
    """Training and evaluation rows, each with `prompt`, `prompt_style` and `task`."""

    train: list[Row]
    eval: list[Row]
    record: dict[str, Any]
    """The `data` entry of run.json."""
    also: dict[str, list[Row]] = field(default_factory=dict)
    """The rows of each task in `eval.also`."""
    row_lengths: RowLengths | None = None
    """None before `fit_data`."""


def start_sandbox(data: DataConfig, settings: sandbox.Settings, also: Sequence[str] = ()) -> None:
    """Start the sandbox if grading the run's tasks or those of `also` runs programs, and print its isolation."""
    if runs_programs(data, also):
        console.note(f"sandbox: {sandbox.start(settings)}")


def check_tasks(config: RunConfig) -> None:
    """Raise a UserError if a run's tasks do not allow its settings. Loads no rows, so that a plan can call it."""
    if config.model.engine == "unsloth" and has_conversations(config):
        raise UserError("conversations and agents cannot be sampled by Unsloth's trainer; pass --model.engine peft")
    _check_few_shot(config.data)


def load_data(config: RunConfig) -> Data:
    """Load the training and evaluation rows of a run with their prompts. Call `start_sandbox` first."""
    check_tasks(config)
    _note_rows_of_the_file(config.data)
    data = _load(config.data, config.seed, train_seed=config.seed)

    # Other tasks that the run is evaluated on.
    also: dict[str, list[Row]] = {}
    digests: dict[str, str] = {}
    for name in config.eval.also:
        settings = other_task(config.data, name, config.eval.also_limit)
        other_data = load_evaluation_rows(settings, config.seed, config.seed)
        also[name] = other_data.eval
        digests[name] = other_data.record["eval"]["sha256"]
    data = replace(data, also=also, record={**data.record, "also": digests})

    if len(data.train) < config.train.prompts_per_step:
        raise UserError(
            f"{len(data.train)} training rows are left, fewer than --train.prompts-per-step "
            f"{config.train.prompts_per_step}; add rows with {source_of_rows(config.data.task)} or lower it"
        )
    return data


def other_task(data: DataConfig, task: str, limit: int | None = None) -> DataConfig:
    """Return the settings to evaluate a run on another task. Of the run's settings, only `prompt_style` is kept.

    A task of programs has the style `code`. Any other task has the run's style, or `xml` if that is `code`.
    """
    style: Any = data.prompt_style
    if task in CODE_TASKS:
        style = "code"
    elif style == "code":
        style = "xml"
    return DataConfig(task=task, prompt_style=style, eval_limit=limit)


def load_evaluation_rows(data: DataConfig, seed: int, train_seed: int) -> Data:
    """Load the evaluation rows of a run with their prompts, and training rows only if few-shot examples need them.

    Args:
        seed: chooses the evaluation rows if `data.eval_limit` is set.
        train_seed: the seed of the run, which chose its training rows and so its few-shot examples.
    """
    return _load(data, seed, train_seed=train_seed if data.few_shot else None)


def _load(data: DataConfig, seed: int, *, train_seed: int | None) -> Data:
    """Load the evaluation rows, and the training rows if `train_seed` is set.

    Three kinds of rows are dropped, in this order: repeated rows; training rows whose question is in the evaluation
    set; and rows of code tasks whose reference program fails. The number of dropped rows is printed.
    """
    train: list[Row] = []
    if train_seed is not None:
        train = _load_unique(data, "train")
    evaluation = _load_unique(data, "eval")

    # Refuse to train and evaluate on the same questions. This must be seen before the limits are applied, because two
    # small samples of the same questions may have none in common.
    all_are_evaluated = not without_problems_of(evaluation, train, data)
    if train and all_are_evaluated:
        raise UserError(
            f"all {len(train)} training questions are also in the evaluation set ({len(evaluation)} rows); pass other "
            "rows for one of them"
        )

    # All evaluation rows count, also those that the limit leaves out: the adapter may be evaluated on them later.
    train = sources.sample(train, data.train_limit, train_seed or 0)
    disjoint_train = without_problems_of(evaluation, train, data)
    num_dropped = len(train) - len(disjoint_train)
    if num_dropped:
        console.note(f"dropped {num_dropped} training rows whose questions are in the evaluation set")
    train = disjoint_train
    evaluation = sources.sample(evaluation, data.eval_limit, seed)

    if data.task in _CHECKED_TASKS:
        train = solvable(train)
    if data.evaluation_task in _CHECKED_TASKS:
        evaluation = solvable(evaluation)
    if not evaluation:
        raise UserError(f"no {data.evaluation_task} row is left to evaluate; pass other rows")

    # Few-shot examples are not trained on.
    example_rows = train[: data.few_shot]
    if len(example_rows) < data.few_shot:
        raise UserError(
            f"few-shot is {data.few_shot} and {len(example_rows)} training rows are left as worked examples; lower it, "
            f"or add rows with {source_of_rows(data.task)}"
        )
    train = train[data.few_shot :]
    examples = _examples(example_rows, data)
    prompted_train = _with_prompts(train, data.task, data.prompt_style, examples)
    prompted_evaluation = _with_prompts(evaluation, data.evaluation_task, data.prompt_style, examples)

    record = {
        "task": task_title(data.task),
        "eval_task": task_title(data.evaluation_task),
        "train": {"source": data.train, "rows": len(train), "sha256": fingerprint([*example_rows, *train])},
        "eval": {"source": data.eval, "rows": len(evaluation), "sha256": fingerprint(evaluation)},
        "system_prompt": _common_system_prompt(prompted_train),
        "tools": [tool["function"]["name"] for tool in prompted_evaluation[0].get("tools") or ()],
        "sandbox": sandbox.describe() if runs_programs(data) else None,
    }
    return Data(prompted_train, prompted_evaluation, record)


def _load_unique(data: DataConfig, split: str) -> list[Row]:
    """Load a split without rows that repeat an earlier row, and print how many were dropped."""
    rows = load_split(data, split)
    task = data.task if split == "train" else data.evaluation_task
    unique = unique_rows(rows, task)
    num_dropped = len(rows) - len(unique)
    if num_dropped:
        console.note(f"dropped {num_dropped} of {len(rows)} {split} rows that repeat another row")
    return unique


def _examples(rows: Sequence[Row], data: DataConfig) -> list[tuple[str, str]]:
    """Return the few-shot examples of some training rows, as (question, completion)."""
    if not rows:
        return []
    _check_few_shot(data)
    task = get_task(data.task)
    return [(row["question"], task.gold({**row, "prompt_style": data.prompt_style})) for row in rows]


def _note_rows_of_the_file(data: DataConfig) -> None:
    """Tell which rows a task file makes itself if a source is given for the others only.

    The example of `lora-grpo new` has rows of its own, on which nobody wants to evaluate another task.
    """
    if data.eval_task or not is_task_file(data.task) or bool(data.train) == bool(data.eval):
        return
    given, other = ("--data.train", "--data.eval") if data.train else ("--data.eval", "--data.train")
    console.note(f"{given} is given and {other} is not: load in {Path(data.task).name} makes the other rows itself")


def _check_few_shot(data: DataConfig) -> None:
    """Raise a UserError if few-shot examples are wanted and the task has no reference completions."""
    task = get_task(data.task)
    if data.few_shot and (task.environment or not task.has_gold):
        name = Path(data.task).name
        raise UserError(f"--data.few-shot shows reference completions; {name} must define check and gold(row) for them")


def _with_prompts(rows: Sequence[Row], task_name: str, style: str, examples: Sequence[tuple[str, str]]) -> list[Row]:
    """Return rows with their task and their prompts, which include what the task's environment adds."""
    prompted_rows = add_prompts([{**row, "task": task_name} for row in rows], style, examples)
    task = get_task(task_name)
    if not isinstance(task, TaskFile):
        return prompted_rows
    # This starts an environment for each row, so it is done only for rows that a run uses.
    return [task.with_opening(row) for row in prompted_rows]


def _common_system_prompt(rows: Sequence[Row]) -> str | None:
    """Return the system prompt that all rows have; None if they have none or different ones."""
    system_prompts = set()
    for row in rows:
        first_message = row["prompt"][0]
        has_system_prompt = first_message["role"] == "system"
        system_prompts.add(first_message["content"] if has_system_prompt else None)
    return system_prompts.pop() if len(system_prompts) == 1 else None
