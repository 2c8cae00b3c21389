"""Lengths of rows: drop those that do not fit the context, and measure the rest for the memory plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lora_grpo import console
from lora_grpo.config import RunConfig
from lora_grpo.data.loading import Data
from lora_grpo.data.references import gold_episodes
from lora_grpo.errors import UserError
from lora_grpo.grading import Row
from lora_grpo.memory import RowLengths
from lora_grpo.prompts import chat, render_row, turns
from lora_grpo.tasks import get_task, task_title


@dataclass(frozen=True)
class _SizedRow:
    """A row, and what the model reads of it."""

    row: Row
    prompt_length: int
    """Number of tokens of the prompt."""
    largest_token_id: int
    teacher_prompt_length: int = 0
    """Number of tokens of the prompt that a teacher reads in place of the model's; 0 if there is none."""
    reference_length: int = 0
    """Number of tokens of the reference answer if SFT trains on the row; otherwise 0."""

    @property
    def answered_length(self) -> int:
        """Number of tokens of the prompt with the reference answer if SFT trains on the row; otherwise 0."""
        return self.prompt_length + self.reference_length if self.reference_length else 0


def fit_data(data: Data, tokenizer: Any, config: RunConfig) -> Data:
    """Return the rows whose prompt and longest completion fit the context, with their lengths.

    SFT also drops training rows whose reference answer exceeds the longest completion, because an evaluation would
    truncate it. The number of dropped rows is printed.
    """
    train = _fitting(data.train, tokenizer, config, "train")
    evaluation = _fitting(data.eval, tokenizer, config, "eval")
    sized_rows = [*train, *evaluation]
    also: dict[str, list[Row]] = {}
    for name, rows in data.also.items():
        sized_rows_of_task = _fitting(rows, tokenizer, config, task_title(name))
        sized_rows += sized_rows_of_task
        also[name] = [sized.row for sized in sized_rows_of_task]

    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    row_lengths = RowLengths(
        rows=len(sized_rows),
        longest_prompt=max(sized.prompt_length for sized in sized_rows),
        longest_teacher_prompt=max(sized.teacher_prompt_length for sized in train),
        longest_answered=max(sized.answered_length for sized in train),
        has_conversations=any("reset_text" in sized.row or "prompt_tokens" in sized.row for sized in sized_rows),
        largest_token_id=max(padding or 0, *(sized.largest_token_id for sized in sized_rows)),
    )
    return replace(
        data,
        train=[sized.row for sized in train],
        eval=[sized.row for sized in evaluation],
        also=also,
        row_lengths=row_lengths,
    )


def _fitting(rows: Sequence[Row], tokenizer: Any, config: RunConfig, split: str) -> list[_SizedRow]:
    """Return the rows of a split that fit the context."""
    if "reset_text" in rows[0]:
        _check_conversations(rows[0], tokenizer, config)

    completion_limit = config.sampling.max_completion_tokens
    prompt_limit = config.model.max_sequence_tokens - completion_limit
    least_rows = config.train.prompts_per_step if split == "train" else 1

    sized_rows = []
    for row in rows:
        prompt_ids = tokenizer(render_row(tokenizer, row), add_special_tokens=False)["input_ids"]
        prompt_length = row.get("prompt_tokens", len(prompt_ids))  # an agent makes its own prompt
        sized_rows.append(_SizedRow(row, prompt_length, max(prompt_ids, default=0)))
    sized_rows = _within_limit(
        sized_rows,
        [sized.prompt_length for sized in sized_rows],
        prompt_limit,
        f"{split} rows: their prompts have more than {prompt_limit} tokens "
        "(--model.max-sequence-tokens minus --sampling.max-completion-tokens)",
        least_rows,
    )
    if split == "train" and config.teacher.reads_own_prompt:
        return _fitting_teacher(sized_rows, tokenizer, prompt_limit, least_rows)
    if config.method != "sft" or split != "train":
        return sized_rows

    # SFT also reads the reference answers.
    episodes = gold_episodes(tokenizer, [sized.row for sized in sized_rows])
    answered_rows = []
    for sized, episode in zip(sized_rows, episodes, strict=True):
        reference_length = len(episode.token_ids)
        largest_token_id = max(sized.largest_token_id, *episode.token_ids)
        answered_rows.append(replace(sized, reference_length=reference_length, largest_token_id=largest_token_id))
    return _within_limit(
        answered_rows,
        [sized.reference_length for sized in answered_rows],
        completion_limit,
        f"{split} rows: their reference answers have more than {completion_limit} tokens "
        "(--sampling.max-completion-tokens)",
        least_rows,
    )


def _fitting_teacher(
    sized_rows: Sequence[_SizedRow], tokenizer: Any, prompt_limit: int, least_rows: int
) -> list[_SizedRow]:
    """Return the rows for which the teacher's own prompt fits the context."""
    measured_rows = []
    for sized in sized_rows:
        prompt_ids = tokenizer(teacher_prompt_text(tokenizer, sized.row), add_special_tokens=False)["input_ids"]
        largest_token_id = max(sized.largest_token_id, *prompt_ids)
        measured_rows.append(replace(sized, teacher_prompt_length=len(prompt_ids), largest_token_id=largest_token_id))
    return _within_limit(
        measured_rows,
        [sized.teacher_prompt_length for sized in measured_rows],
        prompt_limit,
        f"train rows: the prompts of their teacher have more than {prompt_limit} tokens "
        "(--model.max-sequence-tokens minus --sampling.max-completion-tokens)",
        least_rows,
    )


def teacher_prompt_text(tokenizer: Any, row: Row) -> str:
    """Return the rendered prompt that a teacher reads for a row of a task with `teacher_prompt`."""
    messages = get_task(row["task"]).teacher_prompt(row)
    return chat.render_prompt(tokenizer, messages, row.get("tools") or ())


def _within_limit(
    sized_rows: Sequence[_SizedRow], lengths: Sequence[int], limit: int, reason: str, least_rows: int
) -> list[_SizedRow]:
    """Return the rows whose length is at most the limit. Print how many are dropped, and the reason.

    Raises:
        UserError: rows are dropped, and fewer than `least_rows` are left.
    """
    fitting = [sized for sized, length in zip(sized_rows, lengths, strict=True) if length <= limit]
    num_dropped = len(sized_rows) - len(fitting)
    dropped = f"{num_dropped} of {len(sized_rows)} {reason}"
    if num_dropped and len(fitting) < least_rows:
        raise UserError(f"too few rows are left without {dropped}; the longest has {max(lengths)}: raise the limit")
    if num_dropped:
        console.note(f"dropped {dropped}")
    return fitting


def _check_conversations(row: Row, tokenizer: Any, config: RunConfig) -> None:
    """Raise UserError if the chat template cannot render tool calls, or if the budget has no room for a second turn."""
    if row["tools"]:
        turns.response_format(tokenizer)  # raises if there is none
        tool_name = row["tools"][0]["function"]["name"]
        following: chat.Message = {"role": "tool", "name": tool_name, "content": ""}
    else:
        following = {"role": "user", "content": ""}

    text = turns.following_text(tokenizer, [following])
    tokens_between_turns = len(tokenizer([text], add_special_tokens=False)["input_ids"][0])
    least_tokens = tokens_between_turns + 2  # two turns of one token
    limit = config.sampling.max_completion_tokens
    if limit <= least_tokens:
        raise UserError(
            f"--sampling.max-completion-tokens {limit} has no room for a second turn: two turns of one token and the "
            f"chat template between them take more than {least_tokens}; raise it"
        )
