"""Training rows as TRL is given them, and what a reward function is called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lora_grpo.errors import UserError
from lora_grpo.rewards.guard import one_line
from lora_grpo.rewards.specs import Reward
from lora_grpo.tasks import Row, chat


def trl_rows(tokenizer: Any, rows: Sequence[Row]) -> list[Row]:
    """Return rows that all have every column of any of them, None where they lack it.

    `prompt` is chat messages, or plain text for a base model, whose tokenizer has no chat template.
    """
    names = {name: None for row in rows for name in row}
    chats = bool(getattr(tokenizer, "chat_template", None))
    return [{**names, **row, "prompt": row["prompt"] if chats else chat.render_row(tokenizer, row)} for row in rows]


def training_set(tokenizer: Any, rows: Sequence[Row], order: Sequence[int]) -> Any:
    """Return TRL's data set.

    Args:
        tokenizer: of the policy.
        rows: training rows with `prompt`.
        order: the place in `rows` of each prompt, in the order in which they are asked.

    Raises:
        UserError: a column holds values of several types.
    """
    from datasets import Dataset
    from pyarrow import ArrowInvalid, ArrowTypeError

    try:
        return Dataset.from_list(trl_rows(tokenizer, rows)).select(order)
    except (ArrowInvalid, ArrowTypeError) as error:
        raise UserError(f"a column of the training rows holds values of several types: {one_line(error)}") from error


def score(
    rewards: Sequence[Reward],
    asked: Sequence[Row],
    texts: Sequence[str],
    token_ids: Sequence[list[int]],
    trainer_state: Any = None,
) -> list[dict[str, float | None]]:
    """Return what each reward function gives completions, calling it as TRL's trainer does.

    Args:
        rewards: what `reward_registry.resolve` returned.
        asked: R rows of `trl_rows`, the one that each completion answers.
        texts: R completions.
        token_ids: R lists of their tokens, the end token included.
        trainer_state: of transformers' Trainer, where there is one.

    Returns:
        R times each reward's value by name, before its scale; None where it cannot grade the row.

    Raises:
        RewardError: a reward function failed.

    Source: `GRPOTrainer._calculate_rewards`, TRL 1.14.2.
    """
    prompts = [row["prompt"] for row in asked]
    columns = {name: [row[name] for row in asked] for name in asked[0] if name != "prompt"}
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
