"""The rows of a run: loaded, kept apart, asked as prompts, fingerprinted."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo import sandbox
from lora_grpo.config import MIN_VALIDATION_ROWS, DataConfig, RunConfig
from lora_grpo.errors import UserError
from lora_grpo.tasks.chat import add_prompts, render_row
from lora_grpo.tasks.code_grading import solvable
from lora_grpo.tasks.registry import CODE_TASKS, Row, get_task, runs_programs
from lora_grpo.tasks.sources import draw


@dataclass(frozen=True)
class Data:
    """Training and held-out rows, each with `prompt`, `prompt_style` and `task`."""

    train: list[Row]
    eval: list[Row]
    record: dict[str, Any]
    """What run.json says of them: source, number of rows, fingerprint."""


def start_sandbox(data: DataConfig, settings: sandbox.Settings) -> None:
    """Start the sandbox if grading these tasks runs programs, and print its isolation.

    Raises:
        UserError: no safe isolation is available here.
    """
    if runs_programs(data):
        print(f"sandbox: {sandbox.start(settings)}", file=sys.stderr)


def load_data(config: RunConfig) -> Data:
    """Load both splits and write their prompts; call `start_sandbox` first.

    A training row whose question is also held out is left out of training. Where the benchmark has no split to train
    on, it is the evaluation that loses the row. Either number is said.

    Raises:
        UserError: a source is missing, malformed or empty, or too small for one step.
    """
    asked = config.data
    data = _load(asked, config.seed, config.seed)
    if len(data.train) < config.train.prompts_per_step:
        raise UserError(
            f"{len(data.train)} training rows are left, fewer than --train.prompts-per-step "
            f"{config.train.prompts_per_step}; give more rows with --data.train or lower it"
        )
    paid_tags = [item for item in config.rewards if "xml" in item]
    if asked.prompt_style != "xml" and paid_tags:
        print(
            f"--data.prompt-style {asked.prompt_style} asks for no XML tags, and {', '.join(paid_tags)} pay for them; "
            "choose --rewards to go with it",
            file=sys.stderr,
        )
    return data


def load_evaluation_rows(asked: DataConfig, seed: int, *, trained_seed: int | None) -> Data:
    """Load the held-out rows as a run of these settings has them, and their prompts.

    Training rows are loaded only where they are shown as worked examples, or decide what is held out.

    Args:
        asked: the run's settings, or those of an evaluation.
        seed: of the draw of held-out rows.
        trained_seed: the seed that a run drew its training rows of this data with; None where there is no run.

    Raises:
        UserError: as `load_data`; or worked examples are asked of a benchmark without training rows.
    """
    one_split = getattr(get_task(asked.task), "ONE_SPLIT", False)
    if one_split and asked.few_shot and trained_seed is None:
        raise UserError(f"{asked.task} has no training rows to show as worked examples; pass --few-shot 0")
    if not asked.few_shot and not (one_split and trained_seed is not None):
        return _load(asked, seed, None)
    return _load(asked, seed, seed if trained_seed is None else trained_seed)


def _load(asked: DataConfig, seed: int, train_seed: int | None) -> Data:
    """Load the held-out rows, and the training rows where they have a seed."""
    task, evaluation_task = get_task(asked.task), get_task(asked.evaluation_task)
    with_training = train_seed is not None
    train = [] if train_seed is None else task.load("train", asked.train, asked.train_limit, train_seed)
    one_split = bool(getattr(task, "ONE_SPLIT", False)) and with_training
    # Where both splits are the same rows, the evaluation is drawn from what training leaves.
    validation = evaluation_task.load("eval", asked.eval, None if one_split else asked.eval_limit, seed)
    lost = 0
    if one_split:
        left = _left_to_evaluate(train, validation, asked.task)
        lost = len(validation) - len(left)
        validation = draw(left, asked.eval_limit, seed)
    elif with_training:
        train = _left_to_train(train, validation)
    train, validation = _solvable(train, asked.task), _solvable(validation, asked.evaluation_task)
    if not validation:
        raise UserError(
            f"no {asked.evaluation_task} row is left to evaluate; give others with {asked.eval or 'the data'}"
        )
    shots, train = train[: asked.few_shot], train[asked.few_shot :]
    record = {
        "task": asked.task,
        "eval_task": asked.evaluation_task,
        "train": {"source": asked.train, "rows": len(train), "sha256": fingerprint([*shots, *train])},
        "eval": {"source": asked.eval, "rows": len(validation), "sha256": fingerprint(validation)},
        "trained_on_benchmark": asked.task if one_split else None,
        "left_out_as_trained_on": lost,
        "sandbox": sandbox.describe() if runs_programs(asked) else None,
    }

    def ask(rows: Sequence[Row], task_name: str) -> list[Row]:
        prompted = add_prompts(rows, asked.prompt_style, shots, gold_completion=task.gold_completion)
        return [{**row, "task": task_name} for row in prompted]

    return Data(train=ask(train, asked.task), eval=ask(validation, asked.evaluation_task), record=record)


def _solvable(rows: list[Row], task: str) -> list[Row]:
    # The starter's problems come with the proof, in the tests of the kit.
    return solvable(rows) if task in CODE_TASKS and task != "starter-code" else rows


def _left_to_train(train: list[Row], validation: list[Row]) -> list[Row]:
    """Leave out of training what is held out, and say how many rows that costs."""
    apart = _apart(train, validation)
    if len(apart) < len(train):
        print(f"left {len(train) - len(apart)} training rows out: their questions are held out too", file=sys.stderr)
    return apart


def _left_to_evaluate(train: list[Row], validation: list[Row], task: str) -> list[Row]:
    """Leave out of the evaluation what is trained on, of a benchmark that has nothing else to train on, and say so."""
    apart = _apart(validation, train)
    lost = len(validation) - len(apart)
    if not apart:
        raise UserError(
            f"every {task} problem would be trained on, and none is left to evaluate; "
            "pass --data.train-limit 10, or --data.eval-task with another benchmark"
        )
    print(
        f"CONTAMINATED: training on {len(train)} {task} problems; no score of this adapter on {task} says anything any "
        "more" + (f", and the {lost} of them are left out of the evaluation" if lost else ""),
        file=sys.stderr,
    )
    return apart


def _apart(rows: list[Row], others: list[Row]) -> list[Row]:
    """Return the rows whose question is none of the others'."""
    questions = {row["question"] for row in others}
    return [row for row in rows if row["question"] not in questions]


def fit_to_context(rows: Sequence[Row], tokenizer: Any, config: RunConfig, split: str) -> list[Row]:
    """Leave out rows whose prompt and longest completion exceed the context, and say how many.

    Raises:
        UserError: too few rows are left.
    """
    room = config.model.max_sequence_tokens - config.sampling.max_completion_tokens
    lengths = [len(tokenizer(render_row(tokenizer, row), add_special_tokens=False)["input_ids"]) for row in rows]
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= room]
    if len(kept) < len(rows):
        print(
            f"left {len(rows) - len(kept)} of {len(rows)} {split} rows out: their prompts have more than {room} tokens "
            "(--model.max-sequence-tokens less --sampling.max-completion-tokens)",
            file=sys.stderr,
        )
    if len(kept) < (config.train.prompts_per_step if split == "train" else 1):
        raise UserError(
            f"{len(kept)} of {len(rows)} {split} rows have prompts of at most {room} tokens (the longest has "
            f"{max(lengths)}); raise --model.max-sequence-tokens"
        )
    return kept


def fingerprint(rows: Sequence[Row]) -> str:
    """Return the SHA-256 of the rows' content, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def prompt_order(num_rows: int, num_prompts: int, seed: int) -> list[int]:
    """Return which row is asked at each of `num_prompts` places: one seeded shuffle of all rows after another.

    The order is fixed before training and a longer run begins like a shorter one, so that a run can be resumed, or
    extended, in the middle of any pass over the data.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < num_prompts:
        order += generator.permutation(num_rows).tolist()
    return order[:num_prompts]


_MOST_SHARE = 10
"""At most a tenth of the training rows is kept out."""


def split_validation(rows: Sequence[Row], config: RunConfig) -> tuple[list[Row], list[Row]]:
    """Part the training rows into those that are trained on and those that are validation_rows; the seed decides.

    Args:
        rows: R training rows.
        config: `monitor.rows` of them become validation rows, at most a tenth.

    Returns:
        The rows to train on and the rows to watch, each in their order; none to watch where fewer than 16 would be.

    Raises:
        UserError: early stopping is asked for and there are too few rows.
    """
    number = min(config.monitor.rows, len(rows) // _MOST_SHARE)
    if number < MIN_VALIDATION_ROWS:
        if config.monitor.rows:
            told = (
                f"no training row is held out for the watch: a tenth of {len(rows)} is fewer than {MIN_VALIDATION_ROWS}"
            )
            if config.monitor.early_stopping:
                raise UserError(f"{told}, and --monitor.early-stopping goes by them; give more rows or leave it out")
            print(f"{told}; no best adapter is kept", file=sys.stderr)
        return list(rows), []
    import numpy as np

    chosen = set(np.random.default_rng(config.seed).choice(len(rows), size=number, replace=False).tolist())
    return (
        [row for place, row in enumerate(rows) if place not in chosen],
        [row for place, row in enumerate(rows) if place in chosen],
    )
