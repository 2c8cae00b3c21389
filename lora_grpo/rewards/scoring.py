"""Score completions: grade each once, and call the rewards the way TRL does."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lora_grpo import asynchronous
from lora_grpo.grading import Row, Verdict
from lora_grpo.prompts import chat, plain_text, thoughts
from lora_grpo.rewards.functions import RewardFunction, completion_text, correct_answer
from lora_grpo.rewards.specs import Reward, call_together
from lora_grpo.rollouts import Episode, grade
from lora_grpo.tasks import grade_all, reward_columns

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
    rewards: Sequence[float | None]
    """For each completion, the weighted sum of the rewards that can grade its row; None if none can."""
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
        self._columns = {row["id"]: reward_columns(row) for row in rows}
        self._names = {name: None for columns in self._columns.values() for name in columns}
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
            _as_trl_completion(completion, prompt, row)
            for completion, prompt, row in zip(completions, prompts, rows, strict=True)
        ]
        texts = [completion_text(completion) for completion in completions]
        verdicts = grade_all(rows[0]["task"], texts, rows) if verdicts is None else verdicts
        arguments: dict[str, Any] = {name: [self._columns[row["id"]].get(name) for row in rows] for name in self._names}
        arguments |= {"prompts": prompts, "completions": completions, "completion_ids": list(token_ids)}
        arguments |= {"verdicts": verdicts, **_WITHOUT_TRAINER, **given}
        columns_of_values = call_together([reward.function for reward in self.rewards], arguments)
        names = [reward.name for reward in self.rewards]
        values = [dict(zip(names, numbers, strict=True)) for numbers in zip(*columns_of_values, strict=True)]
        sums = [self._weighted_sum(values_by_name) for values_by_name in values]
        return ScoredBatch(rows, texts, token_ids, verdicts, values, sums)

    def _weighted_sum(self, values: Mapping[str, float | None]) -> float | None:
        if all(value is None for value in values.values()):
            return None
        return sum(reward.weight * (values[reward.name] or 0.0) for reward in self.rewards)


def _as_trl_completion(completion: Any, prompt: Any, row: Row) -> Any:
    """Return a completion as TRL passes it to rewards: a message if the prompt consists of messages, or else a text."""
    if not isinstance(completion, str):
        return completion
    if not isinstance(prompt, str):
        return [{"role": "assistant", "content": completion}]
    # A trainer that samples by itself (Unsloth's) does not end a completion at the next question.
    return completion if row.get("completion_prefix") else plain_text.before_next_question(completion)


def completion_texts(tokenizer: Any, rows: Sequence[Row], token_ids: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of B completions of B rows, each with what its prompt has begun; see `prompts/thoughts.py`."""
    begun = [chat.begun_in(chat.render_row(tokenizer, row), row) for row in rows]
    sampled = thoughts.decode(tokenizer, token_ids)
    return [start + text for start, text in zip(begun, sampled, strict=True)]


def trl_prompt(tokenizer: Any, row: Row) -> Any:
    """Return a row's prompt: chat messages, or plain text for a base model, which has no chat template."""
    return row["prompt"] if getattr(tokenizer, "chat_template", None) else chat.render_row(tokenizer, row)


def training_set(tokenizer: Any, rows: Sequence[Row], order: Sequence[int]) -> Any:
    """Build the dataset for TRL's trainer: ids and prompts in the order of training, which lists row indices.

    The dataset itself holds the ids only, and prompts are looked up. Arrow has one type for a column, so it would
    reject messages whose tool calls have arguments of different types, and add None for keys that others have.
    """
    from datasets import Dataset

    prompts = {row["id"]: trl_prompt(tokenizer, row) for row in rows}

    def with_prompts(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        return {"id": batch["id"], "prompt": [prompts[row_id] for row_id in batch["id"]]}

    ids = [rows[index]["id"] for index in order]
    return Dataset.from_dict({"id": ids}).with_transform(with_prompts)


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
        return asynchronous.finished(reward(completions=completions, id=id, verdicts=verdicts, **columns))

    return score
