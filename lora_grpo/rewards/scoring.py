"""Convert rows to the format that TRL expects, and call rewards the way TRL does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lora_grpo.errors import UserError, first_line
from lora_grpo.rewards.specs import Reward
from lora_grpo.tasks import Row, chat


def trl_rows(tokenizer: Any, rows: Sequence[Row]) -> list[Row]:
    """Return rows that all have the same columns. Missing values are None.

    `prompt` is a list of chat messages, or plain text for a base model, which has no chat template.
    """
    columns = {name: None for row in rows for name in row}
    is_chat = bool(getattr(tokenizer, "chat_template", None))
    return [{**columns, **row, "prompt": row["prompt"] if is_chat else chat.render_row(tokenizer, row)} for row in rows]


def training_set(tokenizer: Any, rows: Sequence[Row], order: Sequence[int]) -> Any:
    """Build the dataset for TRL's trainer: the rows in the order of training, which lists row indices."""
    from datasets import Dataset
    from pyarrow import ArrowInvalid, ArrowTypeError

    try:
        return Dataset.from_list(trl_rows(tokenizer, rows)).select(order)
    except (ArrowInvalid, ArrowTypeError, OverflowError) as error:
        raise UserError(
            f"a column of the training rows has values of several types or too large a number: {first_line(error)}"
        ) from error


def score(
    rewards: Sequence[Reward],
    rows: Sequence[Row],
    texts: Sequence[str],
    token_ids: Sequence[list[int]],
    trainer_state: Any = None,
) -> list[dict[str, float | None]]:
    """Score B completions the way TRL's trainer does. `rows` are from `trl_rows`; `token_ids` include the EOS token.

    Returns:
        B dictionaries that map a reward name to its unweighted value, or None if the reward cannot grade the row.

    Source: `GRPOTrainer._calculate_rewards`, TRL 1.14.2.
    """
    prompts = [row["prompt"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    values = [
        reward.function(
            prompts=prompts,
            completions=completions,
            completion_ids=list(token_ids),
            trainer_state=trainer_state,
            log_extra=lambda column, values: None,
            log_metric=lambda name, number: None,
            **columns,
        )
        for reward in rewards
    ]
    return [dict(zip([reward.name for reward in rewards], each, strict=True)) for each in zip(*values, strict=True)]
