"""Score completions: grade each once, and call the rewards the way TRL does."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lora_grpo.rewards.functions import RewardFunction, completion_text, correct_answer
from lora_grpo.rewards.specs import Reward
from lora_grpo.tasks import Episode, Row, Verdict, chat, grade, grade_all, thoughts

_WITHOUT_TRAINER = {"trainer_state": None, **dict.fromkeys(("log_extra", "log_metric"), lambda *_, **__: None)}
"""A placeholder for the trainer's state and loggers."""


@dataclass(frozen=True)
class ScoredBatch:
    """B completions with their verdicts and rewards."""

    rows: Sequence[Row]
    texts: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    """Including the EOS token."""
    verdicts: Sequence[Verdict]
    values: Sequence[dict[str, float | None]]
    """For each completion, the unweighted value of each reward by its name; None if it cannot grade the row."""
    rewards: Sequence[float]
    """For each completion, the weighted sum of the rewards that can grade its row."""
    episodes: Sequence[Episode] = ()
    """The episodes, if the batch was scored from them."""


class Scorer:
    """Scores the completions of training, of the validation set and of `--preview`.

    Rows are looked up by their `id`, so that graders and rewards get them as the task loaded them, whatever the
    trainer's dataset does to its columns.

    Args:
        rows: all rows of the run. Rewards get the columns of all of them; values that a row lacks are None.
    """

    def __init__(self, rewards: Sequence[Reward], tokenizer: Any, rows: Sequence[Row]) -> None:
        self.rewards, self._tokenizer = rewards, tokenizer
        self.rows = {row["id"]: row for row in rows}
        self._columns = {name: None for row in rows for name in row if name != "prompt"}
        self._prompts = {row["id"]: trl_prompt(tokenizer, row) for row in rows}

    def score_episodes(self, episodes: Sequence[Episode], **given: Any) -> ScoredBatch:
        """Score B episodes. Rewards get their conversations as `completions`, and the tokens that the model sampled.

        With environments, they also get them as `environments`, and verdicts are theirs. See `score`.
        """
        task, sessions = episodes[0].row["task"], [episode.session for episode in episodes]
        if all(sessions):
            given["environments"] = [session.environment for session in sessions if session]
        completions = [episode.messages if episode.session else episode.text for episode in episodes]
        ids, sampled = [episode.row["id"] for episode in episodes], [episode.sampled_ids for episode in episodes]
        batch = self.score(ids, completions, sampled, grade(task, episodes), **given)
        return replace(batch, texts=[episode.text for episode in episodes], episodes=episodes)

    def texts(self, ids: Sequence[str], token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of completions that the trainer sampled: with what the prompts of the rows have begun."""
        return completion_texts(self._tokenizer, [self.rows[each] for each in ids], token_ids)

    def score(
        self,
        ids: Sequence[str],
        completions: Sequence[Any],
        token_ids: Sequence[Sequence[int]],
        verdicts: Sequence[Verdict] | None = None,
        **given: Any,
    ) -> ScoredBatch:
        """Score B completions of the rows with B ids.

        Args:
            completions: texts, or conversations that end with the answer.
            token_ids: the token ids of the completions, with the EOS token.
            verdicts: their grades; by default, those of the task's `check`.
            given: further arguments that the trainer passes to rewards, such as `trainer_state`.

        Raises:
            RewardError: a reward failed.
            RunError: a task's `check` failed.

        Source: `GRPOTrainer._calculate_rewards`, TRL 1.14.2.
        """
        rows, prompts = [self.rows[each] for each in ids], [self._prompts[each] for each in ids]
        completions = [
            [{"role": "assistant", "content": completion}]
            if isinstance(completion, str) and not isinstance(prompt, str)
            else completion
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        texts = [completion_text(completion) for completion in completions]
        verdicts = grade_all(rows[0]["task"], texts, rows) if verdicts is None else verdicts
        arguments: dict[str, Any] = {name: [row.get(name) for row in rows] for name in self._columns}
        arguments |= {"prompts": prompts, "completions": completions, "completion_ids": list(token_ids)}
        arguments |= {"verdicts": verdicts, **_WITHOUT_TRAINER, **given}
        called = {reward.name: reward.function(**arguments) for reward in self.rewards}
        values = [{name: numbers[index] for name, numbers in called.items()} for index in range(len(texts))]
        sums = [sum(reward.weight * (each[reward.name] or 0.0) for reward in self.rewards) for each in values]
        return ScoredBatch(rows, texts, token_ids, verdicts, values, sums)


def completion_texts(tokenizer: Any, rows: Sequence[Row], token_ids: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of B completions of B rows, each with what its prompt has begun; see `tasks/thoughts.py`."""
    begun = [chat.begun_in(chat.render_row(tokenizer, row), row) for row in rows]
    sampled = thoughts.decode(tokenizer, token_ids)
    return [start + text for start, text in zip(begun, sampled, strict=True)]


def trl_prompt(tokenizer: Any, row: Row) -> Any:
    """Return a row's prompt: chat messages, or plain text for a base model, which has no chat template."""
    return row["prompt"] if getattr(tokenizer, "chat_template", None) else chat.render_row(tokenizer, row)


def training_set(tokenizer: Any, rows: Sequence[Row], order: Sequence[int]) -> Any:
    """Build the dataset for TRL's trainer: ids and prompts in the order of training, which lists row indices."""
    from datasets import Dataset

    return Dataset.from_list([{"id": row["id"], "prompt": trl_prompt(tokenizer, row)} for row in rows]).select(order)


def graded(
    task: str, rows: Sequence[Row], reward: RewardFunction = correct_answer, tokenizer: Any = None
) -> RewardFunction:
    """Return a reward function for TRL's trainer, whose dataset has the column `id`.

    Args:
        task: name or file of the task that grades completions.
        rows: the task's rows. A completion is graded against the row with its `id`.
        reward: returns rewards from verdicts; by default, the score of the task's `check`.
        tokenizer: for a model that thinks. TRL's texts lack `<think>` if the chat template has opened the thought, and
            markers that are special tokens.
    """
    by_id = {row["id"]: row for row in rows}

    @functools.wraps(reward)
    def score(completions: Sequence[Any], id: Sequence[str], **columns: Any) -> list[float | None]:
        completed = [by_id[name] for name in id]
        texts = [completion_text(completion) for completion in completions]
        if tokenizer is not None:
            texts = completion_texts(tokenizer, completed, columns["completion_ids"])
        verdicts = grade_all(task, texts, completed)
        return reward(completions=completions, id=id, verdicts=verdicts, **columns)

    return score
