"""Load the rows of a run: keep the splits disjoint, add prompts, and compute fingerprints."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo import sandbox
from lora_grpo.config import MIN_VALIDATION_ROWS, DataConfig, RunConfig
from lora_grpo.errors import UserError, suggestion
from lora_grpo.tasks import sources
from lora_grpo.tasks.chat import add_prompts, render_row
from lora_grpo.tasks.code_grading import solvable
from lora_grpo.tasks.registry import (
    CODE_TASKS,
    ONE_SPLIT_TASKS,
    Row,
    get_task,
    is_task_file,
    runs_programs,
    source_of_rows,
    task_title,
)


@dataclass(frozen=True)
class Data:
    """Training and evaluation rows, each with `prompt`, `prompt_style` and `task`."""

    train: list[Row]
    eval: list[Row]
    record: dict[str, Any]
    """The `data` entry of run.json."""


def start_sandbox(data: DataConfig, settings: sandbox.Settings) -> None:
    """Start the sandbox if grading these tasks requires running programs, and print its isolation."""
    if runs_programs(data):
        print(f"sandbox: {sandbox.start(settings)}", file=sys.stderr)


def load_data(config: RunConfig) -> Data:
    """Load the training and evaluation rows of a run with their prompts. Call `start_sandbox` first."""
    source = source_of_rows(config.data.task)
    others = f"other rows with {source}, fewer with --data.train-limit 10, or another --data.eval or --data.eval-task"
    data = _load(config.data, config.seed, train_seed=config.seed, others=others)
    if len(data.train) < config.train.prompts_per_step:
        raise UserError(
            f"{len(data.train)} training rows are left, fewer than --train.prompts-per-step "
            f"{config.train.prompts_per_step}; add rows with {source} or lower it"
        )
    return data


def load_evaluation_rows(data: DataConfig, seed: int, *, trained_seed: int | None) -> Data:
    """Load the evaluation rows of a run with these settings, with their prompts.

    Training rows are loaded only if they are needed as few-shot examples or to determine the evaluation set.
    `trained_seed` is the seed that a run used to sample training rows from this data; None if there is no run.
    """
    one_split = data.task in ONE_SPLIT_TASKS
    if one_split and data.few_shot and trained_seed is None:
        raise UserError(f"{data.task} has no training rows for few-shot examples; pass --few-shot 0")
    if data.few_shot and trained_seed is None:
        trained_seed = seed
    others = "other rows with --data, another --task, or --few-shot 0"
    return _load(data, seed, train_seed=trained_seed if data.few_shot or one_split else None, others=others)


def columns_of(data: DataConfig, split: str) -> dict[str, str]:
    """Return the columns that `data.columns` renames in the source of a split, as {our name: the source's name}.

    The task's own dataset has our names. Raises UserError for a malformed pair or an unknown name.
    """
    sources_of = {"train": (data.task, data.train), "eval": (data.evaluation_task, data.eval)}
    ours = {
        side: getattr(get_task(task), "COLUMNS", ()) if source else () for side, (task, source) in sources_of.items()
    }
    known = sorted({*ours["train"], *ours["eval"]})
    if data.columns and not known:
        raise UserError(
            "--data.columns names the columns of your own gsm8k, humaneval or mbpp rows; pass them, for example with "
            "--data.eval, or leave it out"
        )
    columns: dict[str, str] = {}
    for pair in data.columns:
        name, _, column = pair.partition("=")
        if not column or name in columns:
            raise UserError(
                f"--data.columns {pair!r}: expected NAME=COLUMN once for each name, such as {known[-1]}=problem"
            )
        if name not in known:
            raise UserError(f"--data.columns {pair!r}: the task has no column {name!r}; {suggestion(name, known)}")
        columns[name] = column
    return {name: column for name, column in columns.items() if name in ours[split]}


def load_split(data: DataConfig, split: str) -> list[Row]:
    """Return all rows of the split "train" or "eval", without prompts."""
    name, source = (data.task, data.train) if split == "train" else (data.evaluation_task, data.eval)
    task, columns = get_task(name), columns_of(data, split)
    return task.load(split, source, columns) if columns else task.load(split, source)


def _load_unique(data: DataConfig, split: str) -> list[Row]:
    """Load a split without rows that repeat an earlier one, and print their number.

    Raises:
        UserError: two rows have the same question but different answers.
    """
    name = data.task if split == "train" else data.evaluation_task
    first: dict[str, Row] = {}
    kept: dict[str, Row] = {}
    rows = load_split(data, split)
    for row in rows:
        question = _question(row)
        earlier = first.setdefault(question, row)
        if earlier is not row and not _same_answer(name, earlier, row):
            shown = (
                "different tests"
                if name in CODE_TASKS
                else " and ".join(repr(str(each["answer"])[-40:]) for each in (earlier, row))
            )
            raise UserError(
                f"the {task_title(name)} {split} rows {earlier['id']} and {row['id']} have the same question but not "
                f"the same answer ({shown}); remove one of them"
            )
        # A user's `check` may read any column, so rows of a task file are equal only if all their columns are.
        key = json.dumps({**row, "id": None, "loaded_row": None}, sort_keys=True) if is_task_file(name) else question
        kept.setdefault(key, row)
    if len(kept) < len(rows):
        print(f"dropped {len(rows) - len(kept)} of {len(rows)} {split} rows that repeat another row", file=sys.stderr)
    return list(kept.values())


def _question(row: Mapping[str, Any]) -> str:
    """Return what a row asks: the messages of a task file's row without its system prompt, or the question."""
    messages = [message["content"] for message in row.get("prompt", ()) if message["role"] != "system"]
    return "\n".join(messages or [row["question"]]).strip()


def _same_answer(name: str, first: Row, second: Row) -> bool:
    if name in CODE_TASKS:
        return bool(first["test"] == second["test"])
    if is_task_file(name):
        return bool(first["answer"] == second["answer"])
    task = get_task(name)
    return task.check(task.gold(first), second).passed


def _load(data: DataConfig, seed: int, *, train_seed: int | None, others: str) -> Data:
    """Load the evaluation rows, and the training rows if `train_seed` is set.

    Rows that repeat an earlier one are dropped. Training rows are dropped if their question is in the evaluation set;
    a training set of nothing but evaluation questions is an error. If a benchmark has no training split, the
    rows used for training are dropped from the evaluation set instead. The number of dropped rows is printed. `others`
    says, with the flags of the command, what to pass if no row is left.
    """
    train = [] if train_seed is None else _load_unique(data, "train")
    one_split = train_seed is not None and data.task in ONE_SPLIT_TASKS
    evaluation = _load_unique(data, "eval")
    if train and not one_split and not _without_questions_of(evaluation, train):
        raise UserError(
            f"all {len(train)} training questions are also in the evaluation set ({len(evaluation)} rows); pass "
            f"{others}"
        )
    train = sources.sample(train, data.train_limit, train_seed or 0)
    contaminated = 0
    if one_split:
        left = _without_questions_of(train, evaluation)
        contaminated = len(evaluation) - len(left)
        evaluation = sources.sample(left, data.eval_limit, seed)
        print(
            f"CONTAMINATED: training on {len(train)} {data.task} problems; {data.task} scores of this adapter are not "
            f"comparable; dropped {contaminated} of them from the evaluation set",
            file=sys.stderr,
        )
    else:
        evaluation = sources.sample(evaluation, data.eval_limit, seed)
        left = _without_questions_of(evaluation, train)
        if len(left) < len(train):
            dropped = len(train) - len(left)
            print(f"dropped {dropped} training rows whose questions are in the evaluation set", file=sys.stderr)
        train = left
    train, evaluation = _solvable(train, data.task), _solvable(evaluation, data.evaluation_task)
    if not evaluation:
        raise UserError(f"no {data.evaluation_task} row is left to evaluate; pass {others}")
    shown, train = train[: data.few_shot], train[data.few_shot :]
    examples = [
        (row["question"], get_task(data.task).gold({**row, "prompt_style": data.prompt_style})) for row in shown
    ]

    def with_prompts(rows: Sequence[Row], task_name: str) -> list[Row]:
        return [{**row, "task": task_name} for row in add_prompts(rows, data.prompt_style, examples)]

    prompted = with_prompts(train, data.task)
    record = {
        "task": task_title(data.task),
        "eval_task": task_title(data.evaluation_task),
        "train": {"source": data.train, "rows": len(train), "sha256": fingerprint([*shown, *train])},
        "eval": {"source": data.eval, "rows": len(evaluation), "sha256": fingerprint(evaluation)},
        "system_prompt": _shared_system_prompt(prompted),
        "trained_on_benchmark": data.task if one_split else None,
        "left_out_as_trained_on": contaminated,
        "sandbox": sandbox.describe() if runs_programs(data) else None,
    }
    return Data(prompted, with_prompts(evaluation, data.evaluation_task), record)


def _shared_system_prompt(rows: Sequence[Row]) -> str | None:
    """Return the system message of the rows' prompts; None if they have none or not the same."""
    first = {row["prompt"][0]["content"] if row["prompt"][0]["role"] == "system" else None for row in rows}
    return first.pop() if len(first) == 1 else None


def _without_questions_of(others: list[Row], rows: list[Row]) -> list[Row]:
    questions = {_question(row) for row in others}
    return [row for row in rows if _question(row) not in questions]


def _solvable(rows: list[Row], task: str) -> list[Row]:
    # The starter's problems do not need this check, because the unit tests verify them.
    return solvable(rows) if task in CODE_TASKS and task != "starter-code" else rows


def gold_tokens(tokenizer: Any, rows: Sequence[Row], config: RunConfig) -> list[list[int]]:
    """Return the tokens of each row's gold solution, without the token that ends it."""
    # Plain text prompts end with `Answer:`, as in `chat.render`.
    space = "" if getattr(tokenizer, "chat_template", None) else " "
    golds = [space + get_task(config.data.task).gold(row) for row in rows]
    ids: list[list[int]] = tokenizer(golds, add_special_tokens=False)["input_ids"]
    return ids


def fit_to_context(rows: Sequence[Row], tokenizer: Any, config: RunConfig, split: str) -> list[Row]:
    """Drop rows whose prompt plus the longest completion exceeds the context, and print their number.

    SFT also drops training rows whose gold solution is longer than the longest completion, because an evaluation would
    truncate it.
    """
    longest = config.sampling.max_completion_tokens
    room = config.model.max_sequence_tokens - longest
    prompts = [len(tokenizer(render_row(tokenizer, row), add_special_tokens=False)["input_ids"]) for row in rows]
    needed = config.train.prompts_per_step if split == "train" else 1
    flags = "--model.max-sequence-tokens minus --sampling.max-completion-tokens"
    kept = _short_rows(rows, prompts, room, needed, f"{split} rows: their prompts", flags)
    if config.method == "sft" and split == "train":
        golds = [len(ids) + 1 for ids in gold_tokens(tokenizer, kept, config)]
        flags = "--sampling.max-completion-tokens"
        kept = _short_rows(kept, golds, longest, needed, "train rows: their gold solutions", flags)
    return kept


def _short_rows(
    rows: Sequence[Row], lengths: Sequence[int], limit: int, needed: int, what: str, flags: str
) -> list[Row]:
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
    if len(kept) < len(rows):
        dropped = f"{len(rows) - len(kept)} of {len(rows)} {what} have more than {limit} tokens ({flags})"
        if len(kept) < needed:
            raise UserError(f"too few rows are left without {dropped}; the longest has {max(lengths)}: raise the limit")
        print(f"dropped {dropped}", file=sys.stderr)
    return kept


def fingerprint(rows: Sequence[Row]) -> str:
    """Return the SHA-256 of the rows' content in order, or raise UserError for text that no tokenizer accepts."""
    digest = hashlib.sha256()
    for row in rows:
        try:
            digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode())
        except UnicodeEncodeError as error:
            wrong = ascii(error.object[error.start])
            raise UserError(f"row {row['id']}: {wrong} is not a character of Unicode; remove it") from None
        digest.update(b"\n")
    return digest.hexdigest()


def prompt_order(num_rows: int, num_prompts: int, seed: int) -> list[int]:
    """Return the row index of each prompt in training: one seeded shuffle of all rows per epoch.

    A longer order starts with the shorter one, so a run can resume or be extended in the middle of an epoch.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < num_prompts:
        order += generator.permutation(num_rows).tolist()
    return order[:num_prompts]


def split_validation(rows: Sequence[Row], config: RunConfig) -> tuple[list[Row], list[Row]]:
    """Split training rows into training and validation rows. Sampling uses the run's seed and preserves the order.

    The validation set has `monitor.rows` rows, but at most a tenth of all rows. It is empty if that is less than 16.
    """
    number = min(config.monitor.rows, len(rows) // 10)
    if number < MIN_VALIDATION_ROWS:
        if config.monitor.rows:
            message = f"no validation set: a tenth of {len(rows)} training rows is fewer than {MIN_VALIDATION_ROWS}"
            if config.monitor.early_stopping:
                raise UserError(f"{message}; --monitor.early-stopping needs one: add rows or drop the flag")
            print(f"{message}; no best adapter is kept", file=sys.stderr)
        return list(rows), []
    import numpy as np

    chosen = set(np.random.default_rng(config.seed).choice(len(rows), size=number, replace=False).tolist())
    return (
        [row for index, row in enumerate(rows) if index not in chosen],
        [row for index, row in enumerate(rows) if index in chosen],
    )
