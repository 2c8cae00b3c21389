"""What completions earn outside of a training step: the rewards called as TRL calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lora_grpo.reward_registry import Reward
from lora_grpo.tasks import Row


def score(
    rewards: Sequence[Reward],
    rows: Sequence[Row],
    completions: Sequence[str],
    token_ids: Sequence[Sequence[int]],
    trainer_state: Any = None,
) -> dict[str, list[float | None]]:
    """Return what each reward function says of completions, before scaling.

    Args:
        rewards: what `reward_registry.resolve` returned.
        rows: B rows with `prompt`, the one that each completion answers.
        completions: B texts.
        token_ids: B completions in tokens.
        trainer_state: of transformers, where there is a trainer.

    Returns:
        B values of each reward by its name; None where a row cannot be graded.

    Raises:
        RewardError: a reward function failed.
    """
    names = {name: None for row in rows for name in row if name != "prompt"}
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    answers = [[{"role": "assistant", "content": text}] for text in completions]
    return {
        reward.name: reward.function(
            prompts=[row["prompt"] for row in rows],
            completions=answers,
            completion_ids=[list(ids) for ids in token_ids],
            trainer_state=trainer_state,
            log_extra=lambda column, values: None,
            log_metric=lambda name, number: None,
            **columns,
        )
        for reward in rewards
    }
