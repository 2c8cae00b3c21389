"""Load the rows of a run: keep the splits disjoint, add prompts, and compute fingerprints."""

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_grpo import console, sandbox
from lora_grpo.commands import command
from lora_grpo.config import MIN_VALIDATION_ROWS, DataConfig, RunConfig
from lora_grpo.errors import UserError, suggestion
from lora_grpo.grading import Row, solvable
from lora_grpo.hardware import choose_engine
from lora_grpo.memory import RowLengths
from lora_grpo.prompts import add_prompts, chat, render_row, thoughts, turns
from lora_grpo.rollouts import Episode
from lora_grpo.tasks import (
    CODE_TASKS,
    Generator,
    TaskFile,
    get_task,
    is_own_task,
    runs_programs,
    source_of_rows,
    sources,
    task_title,
)


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


_ENDLESS = 10**9
"""Budget of reference answers, whose lengths are checked later."""


@dataclass(frozen=True)
class _SizedRow:
    """A row that fits the context, and what the model reads of it."""

    row: Row
    prompt: int
    """Tokens of the prompt."""
    largest_token: int
    """The largest token id."""
    answered: int = 0
    """If SFT trains on it, tokens of the prompt with its reference answer."""


def start_sandbox(data: DataConfig, settings: sandbox.Settings, also: Sequence[str] = ()) -> None:
    """Start the sandbox if grading these tasks, and others, requires running programs, and print its isolation."""
    if runs_programs(data, also):
        console.note(f"sandbox: {sandbox.start(settings)}")


def load_data(config: RunConfig) -> Data:
    """Load the training and evaluation rows of a run with their prompts. Call `start_sandbox` first."""
    data = _load(config.data, config.seed, train_seed=config.seed)
    tasks = {name: other_task(config.data, name, config.eval.also_limit) for name in config.eval.also}
    loaded = {name: load_evaluation_rows(task, config.seed, config.seed) for name, task in tasks.items()}
    digests = {name: other.record["eval"]["sha256"] for name, other in loaded.items()}
    also = {name: other.eval for name, other in loaded.items()}
    data = replace(data, also=also, record={**data.record, "also": digests})
    firsts = [rows[0] for rows in (data.train, data.eval, *also.values()) if rows]
    if any("reset_text" in row for row in firsts) and choose_engine(config) == "unsloth":
        raise UserError("conversations cannot be sampled by Unsloth's trainer; pass --model.engine peft")
    if len(data.train) < config.train.prompts_per_step:
        raise UserError(
            f"{len(data.train)} training rows are left, fewer than --train.prompts-per-step "
            f"{config.train.prompts_per_step}; add rows with {source_of_rows(config.data.task)} or lower it"
        )
    return data


def other_task(data: DataConfig, task: str, limit: int | None = None) -> DataConfig:
    """Return the data for an evaluation on another task than that of a run: of the run, only the answer style."""
    style: Any = "xml" if data.prompt_style == "code" else data.prompt_style
    return DataConfig(task=task, prompt_style="code" if task in CODE_TASKS else style, eval_limit=limit)


def load_evaluation_rows(data: DataConfig, seed: int, train_seed: int) -> Data:
    """Load the evaluation rows of a run with these settings, with their prompts.

    Training rows are loaded only if they are needed as few-shot examples; `train_seed` is the seed of the run that
    sampled them.
    """
    return _load(data, seed, train_seed=train_seed if data.few_shot else None)


def columns_of(data: DataConfig, split: str) -> dict[str, str]:
    """Return the columns that `data.columns` renames in the source of a split, as {our name: the source's name}.

    The task's own dataset has our names. Raises UserError for a malformed pair or an unknown name, or if `data.options`
    are of no use.
    """
    if data.options and not any(isinstance(get_task(name), Generator) for name in (data.task, data.evaluation_task)):
        raise UserError(f"--data.options {data.options[0]}: only tasks of reasoning-gym have options, not {data.task}")
    given = {"train": (data.task, data.train), "eval": (data.evaluation_task, data.eval)}
    ours = {side: getattr(get_task(task), "COLUMNS", ()) if source else () for side, (task, source) in given.items()}
    known = sorted({*ours["train"], *ours["eval"]})
    columns: dict[str, str] = {}
    for pair in data.columns:
        name, _, column = pair.partition("=")
        if name not in known or not column:
            names = suggestion(name, known, otherwise=f"those of your own rows are: {', '.join(known) or 'none'}")
            raise UserError(f"--data.columns {pair!r}: expected NAME=COLUMN with a column of the task; {names}")
        if name in columns:
            raise UserError(f"--data.columns {pair!r}: {name} is {columns[name]!r} already; name it once")
        columns[name] = column
    return {name: column for name, column in columns.items() if name in ours[split]}


def load_split(data: DataConfig, split: str) -> list[Row]:
    """Return all rows of the split "train" or "eval", without prompts."""
    name, source = (data.task, data.train) if split == "train" else (data.evaluation_task, data.eval)
    task, columns = get_task(name), columns_of(data, split)
    if isinstance(task, Generator):
        return task.load(split, source, data.options)
    return task.load(split, source, columns) if columns else task.load(split, source)


def _load_unique(data: DataConfig, split: str) -> list[Row]:
    """Load a split without rows that repeat the question of an earlier one, and print their number."""
    name, rows = data.task if split == "train" else data.evaluation_task, load_split(data, split)
    kept: dict[str, Row] = {}
    for row in rows:
        # A user's `check` may read any column, so rows of a task file are equal only if all their columns are.
        kept.setdefault(_columns(row) if is_own_task(name) else _question(row, name), row)
    if len(kept) < len(rows):
        console.note(f"dropped {len(rows) - len(kept)} of {len(rows)} {split} rows that repeat another row")
    return list(kept.values())


def _columns(row: Row) -> str:
    """Return all columns of a row but its id, as text."""
    return json.dumps({**row, "id": None, "loaded_row": {**row["loaded_row"], "id": None}}, sort_keys=True)


def _question(row: Row, task: str) -> str:
    """Return the question of a row: the messages of a task file's row without its system prompt, or the question.

    Rows of an environment often have the same question, so their columns belong to it.
    """
    if getattr(get_task(task), "environment", None):
        return _columns(row)
    messages = [message["content"] for message in row.get("prompt", ()) if message["role"] != "system"]
    return "\n".join(messages or [row["question"]]).strip()


def _keys(row: Row, task: str, data: DataConfig) -> set[Any]:
    """Return what a row shares with one of the other split that has the same problem. MBPP+ has problems of MBPP."""
    is_shared = "entry_point" in row and data.task != data.evaluation_task
    return {_question(row, task), *([(row["id"], row["entry_point"])] if is_shared else ())}


def _load(data: DataConfig, seed: int, *, train_seed: int | None) -> Data:
    """Load the evaluation rows, and the training rows if `train_seed` is set.

    Repeated rows are dropped, then training rows whose question is in the evaluation set, and rows of code tasks whose
    reference program fails. The number of dropped rows is printed.
    """
    train = [] if train_seed is None else _load_unique(data, "train")
    evaluation = _load_unique(data, "eval")
    # Before the limits are applied: a few rows of the same set must not be both trained on and evaluated.
    asked = {key for row in evaluation for key in _keys(row, data.evaluation_task, data)}
    if train and all(asked & _keys(row, data.task, data) for row in train):
        raise UserError(
            f"all {len(train)} training questions are also in the evaluation set ({len(evaluation)} rows); pass other "
            "rows for one of them"
        )
    evaluation = sources.sample(evaluation, data.eval_limit, seed)
    train = sources.sample(train, data.train_limit, train_seed or 0)
    asked = {key for row in evaluation for key in _keys(row, data.evaluation_task, data)}
    left = [row for row in train if not asked & _keys(row, data.task, data)]
    if dropped := len(train) - len(left):
        console.note(f"dropped {dropped} training rows whose questions are in the evaluation set")
    # The starter's reference programs need no check, because the test suite runs them.
    benchmarks = [name for name in CODE_TASKS if name.startswith(("humaneval", "mbpp"))]
    train = solvable(left) if data.task in benchmarks else left
    evaluation = solvable(evaluation) if data.evaluation_task in benchmarks else evaluation
    if not evaluation:
        raise UserError(f"no {data.evaluation_task} row is left to evaluate; pass other rows")
    task, shown, train = get_task(data.task), train[: data.few_shot], train[data.few_shot :]
    if shown and (getattr(task, "environment", None) or not getattr(task, "has_gold", True)):
        raise UserError(f"--data.few-shot shows texts that {Path(data.task).name} does not have: gold(row), with check")
    examples = [(row["question"], task.gold({**row, "prompt_style": data.prompt_style})) for row in shown]
    prompted, evaluated = (
        _opened(name, add_prompts([{**row, "task": name} for row in rows], data.prompt_style, examples))
        for name, rows in ((data.task, train), (data.evaluation_task, evaluation))
    )
    systems = {row["prompt"][0]["content"] if row["prompt"][0]["role"] == "system" else None for row in prompted}
    record = {
        "task": task_title(data.task),
        "eval_task": task_title(data.evaluation_task),
        "train": {"source": data.train, "rows": len(train), "sha256": fingerprint([*shown, *train])},
        "eval": {"source": data.eval, "rows": len(evaluation), "sha256": fingerprint(evaluation)},
        # None if the rows have none or not the same.
        "system_prompt": systems.pop() if len(systems) == 1 else None,
        "tools": [tool["function"]["name"] for tool in evaluated[0].get("tools") or ()],
        "sandbox": sandbox.describe() if runs_programs(data) else None,
    }
    return Data(prompted, evaluated, record)


def _opened(name: str, rows: list[Row]) -> list[Row]:
    """Return rows with what the environment of their task adds. Called for the rows of a run only: it starts games."""
    task = get_task(name)
    return [task.open(row) for row in rows] if isinstance(task, TaskFile) else rows


def gold_episodes(tokenizer: Any, rows: Sequence[Row], ends: Sequence[int] = ()) -> list[Episode]:
    """Return the episodes of the rows' reference answers. With an environment, it answers their turns.

    Args:
        ends: the tokens that end a completion. A turn ends with the one of the chat template, by default of any.

    Raises:
        UserError: the chat template writes a tool call that is read back as another one.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    last, lead = chat.end_of_turn(tokenizer, ends), chat.answer_lead(tokenizer)
    end = tokenizer.convert_tokens_to_ids(last) if last else tokenizer.eos_token_id or next(iter(ends), 0)
    texts = [chat.render_row(tokenizer, row) for row in rows]
    prompts = tokenizer(texts, add_special_tokens=not has_template)["input_ids"]
    form = turns.response_format(tokenizer) if rows[0].get("tools") else None
    episodes = []
    for row, text, ids in zip(rows, texts, prompts, strict=True):
        task, episode = get_task(row["task"]), Episode(row, text, ids, tokenizer, [end], _ENDLESS, form)
        messages = task.gold(row) if episode.session else []
        golds = [turns.answer_text(tokenizer, message) for message in messages] if episode.session else [task.gold(row)]
        for reference in golds:
            if not episode.is_over:
                gold = thoughts.continuation(episode.begun, reference, lead)
                if not has_template and not episode.begun:  # plain text prompts end with `Answer:`, as in `chat.render`
                    gold = f" {gold}"
                episode.take([*tokenizer(gold, add_special_tokens=False)["input_ids"], end], gold, [], truncated=False)
        taken = (message for message in episode.messages if message["role"] == "assistant")
        for message, read in zip(messages, taken, strict=False):
            wanted, found = turns.calls_of(message), turns.calls_of(read)
            for call, other in itertools.zip_longest(wanted, found):
                if call != other:
                    problem = f"{row['id']}: the chat template writes the call {call} of gold(row) as {other}"
                    raise UserError(f"{problem}; pass another --model.chat-template")
        if not episode.is_over:
            episode.end("limit")
        episodes.append(episode)
    return episodes


def fit_data(data: Data, tokenizer: Any, config: RunConfig) -> Data:
    """Return the rows whose prompt and longest completion fit the context, and the longest of them.

    SFT also drops training rows whose reference answer exceeds the longest completion, because an evaluation would
    truncate it. The number of dropped rows is printed.
    """
    train = _fitting(data.train, tokenizer, config, "train")
    evaluation = _fitting(data.eval, tokenizer, config, "eval")
    also = {name: _fitting(rows, tokenizer, config, task_title(name)) for name, rows in data.also.items()}
    sized_rows = [*train, *evaluation, *itertools.chain(*also.values())]
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    row_lengths = RowLengths(
        rows=len(sized_rows),
        longest_prompt=max(sized.prompt for sized in sized_rows),
        longest_answered=max(sized.answered for sized in train),
        has_conversations=any("reset_text" in sized.row for sized in sized_rows),
        largest_token_id=max(padding or 0, *(sized.largest_token for sized in sized_rows)),
    )
    return replace(
        data,
        train=[sized.row for sized in train],
        eval=[sized.row for sized in evaluation],
        also={name: [sized.row for sized in rows] for name, rows in also.items()},
        row_lengths=row_lengths,
    )


def _fitting(rows: Sequence[Row], tokenizer: Any, config: RunConfig, split: str) -> list[_SizedRow]:
    """Return each row that is kept, the tokens of its prompt and, if SFT trains on it, with its reference answer."""

    def fitting(rows: Sequence[_SizedRow], lengths: Sequence[int], limit: int, what: str) -> list[_SizedRow]:
        kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
        dropped = f"{len(rows) - len(kept)} of {len(rows)} {split} rows: their {what}"
        if len(kept) < min(len(rows), config.train.prompts_per_step if split == "train" else 1):
            raise UserError(f"too few rows are left without {dropped}; the longest has {max(lengths)}: raise the limit")
        if len(kept) < len(rows):
            console.note(f"dropped {dropped}")
        return kept

    if "reset_text" in rows[0]:
        _check_conversations(rows[0], tokenizer, config)
    longest = config.sampling.max_completion_tokens
    room = config.model.max_sequence_tokens - longest
    prompts = [tokenizer(render_row(tokenizer, row), add_special_tokens=False)["input_ids"] for row in rows]
    flags = "--model.max-sequence-tokens minus --sampling.max-completion-tokens"
    sized_rows = [_SizedRow(row, len(ids), max(ids, default=0)) for row, ids in zip(rows, prompts, strict=True)]
    lengths = [sized.prompt for sized in sized_rows]
    kept = fitting(sized_rows, lengths, room, f"prompts have more than {room} tokens ({flags})")
    if config.method == "sft" and split == "train":
        golds = [episode.token_ids for episode in gold_episodes(tokenizer, [sized.row for sized in kept])]
        kept = [
            replace(sized, answered=sized.prompt + len(gold), largest_token=max(sized.largest_token, *gold))
            for sized, gold in zip(kept, golds, strict=True)
        ]
        what = f"reference answers have more than {longest} tokens (--sampling.max-completion-tokens)"
        kept = fitting(kept, [len(gold) for gold in golds], longest, what)
    return kept


def _check_conversations(row: Row, tokenizer: Any, config: RunConfig) -> None:
    """Raise UserError if the chat template cannot render tool calls, or if the budget has no room for a second turn."""
    following: chat.Message = {"role": "user", "content": ""}
    if row["tools"]:
        turns.response_format(tokenizer)
        following = {"role": "tool", "name": row["tools"][0]["function"]["name"], "content": ""}
    text = turns.following_text(tokenizer, [following])
    least, budget = len(tokenizer([text], add_special_tokens=False)["input_ids"][0]) + 2, config.sampling
    if budget.max_completion_tokens <= least:
        raise UserError(
            f"--sampling.max-completion-tokens {budget.max_completion_tokens} has no room for a second turn: two turns "
            f"of one token and the chat template between them take more than {least}; raise it"
        )


def fingerprint(rows: Sequence[Row]) -> str:
    """Return the SHA-256 of the rows' content in order, or raise UserError for text that no tokenizer accepts."""
    digest = hashlib.sha256()
    for row in rows:
        try:
            digest.update(f"{json.dumps(row, sort_keys=True, ensure_ascii=False)}\n".encode())
        except UnicodeEncodeError as error:
            wrong = ascii(error.object[error.start])
            raise UserError(f"row {row['id']}: {wrong} is not a Unicode character; remove it") from None
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
        message = f"no validation set: --monitor.rows or a tenth of {len(rows)} is less than {MIN_VALIDATION_ROWS}"
        if config.monitor.early_stopping:
            raise UserError(f"{message}; --monitor.early-stopping needs one: add rows or drop the flag")
        if config.monitor.rows:
            console.note(f"{message}; no best adapter is kept")
        return list(rows), []
    import numpy as np

    chosen = set(np.random.default_rng(config.seed).choice(len(rows), size=number, replace=False).tolist())
    train, validation = ([row for index, row in enumerate(rows) if (index in chosen) == part] for part in (False, True))
    return train, validation


def sft_command(config: RunConfig) -> str | None:
    """Return the command that trains on the task's reference answers first.

    None if the task has none, or if the run already starts from an adapter.
    """
    if config.lora.from_ or not getattr(get_task(config.data.task), "has_gold", True):
        return None
    preset = ["--preset", "laptop"] if config.preset == "laptop" else []  # `auto` would choose another
    return command("train sft", *preset, "--task", config.data.task)
