"""Score completions: grade each once, and call the rewards the way TRL does."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lora_grpo import asynchronous
from lora_grpo.grading import Row, Verdict
from lora_grpo.prompts import chat, thoughts
from lora_grpo.rewards.functions import RewardFunction, completion_text, correct_answer
from lora_grpo.rewards.guard import call_together
from lora_grpo.rewards.specs import Reward
from lora_grpo.rewards.trl_data import trl_completion, trl_prompt
from lora_grpo.rollouts import Episode, grade
from lora_grpo.tasks import grade_all, reward_columns


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a logger of the trainer."""


_WITHOUT_TRAINER = {"trainer_state": None, "log_extra": _log_nothing, "log_metric": _log_nothing}
"""What rewards get in place of the trainer's state and loggers when there is no trainer."""


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
        self.rewards = rewards
        self.rows = {row["id"]: row for row in rows}
        self._tokenizer = tokenizer
        self._prompts = {row["id"]: trl_prompt(tokenizer, row) for row in rows}

        # The columns that rewards get of each row, and the names of all of them in the order of the rows.
        self._columns = {row["id"]: reward_columns(row) for row in rows}
        self._column_names: dict[str, None] = {}
        for columns in self._columns.values():
            self._column_names.update(dict.fromkeys(columns))

    def score_episodes(self, episodes: Sequence[Episode], **extra_arguments: Any) -> ScoredBatch:
        """Score B episodes; see `score`.

        Rewards get the conversation of each episode as its completion, and the tokens that the model sampled. If the
        task has an Environment, rewards also get the B environments as `environments`, and the verdicts come from the
        environments.
        """
        texts = [episode.text for episode in episodes]
        completions: list[Any] = list(texts)
        sessions = [episode.session for episode in episodes if episode.session]
        if sessions:  # the task has an Environment, so all episodes are conversations
            completions = [episode.messages for episode in episodes]
            extra_arguments["environments"] = [session.environment for session in sessions]
        if any(episode.agent for episode in episodes):
            completions = [episode.messages for episode in episodes]
        batch = self.score(
            ids=[episode.row["id"] for episode in episodes],
            completions=completions,
            token_ids=[episode.sampled_ids for episode in episodes],
            verdicts=grade(episodes[0].row["task"], episodes),
            **extra_arguments,
        )

        # Episodes whose agent failed have no rewards: the model is not to learn from them.
        values = list(batch.values)
        rewards = list(batch.rewards)
        for index, episode in enumerate(episodes):
            if episode.failure:
                values[index] = dict.fromkeys(batch.values[index])
                rewards[index] = None

        # `score` takes the last message of a conversation for its text; here, its text is the whole transcript.
        return replace(batch, texts=texts, values=values, rewards=rewards, episodes=episodes)

    def texts(self, ids: Sequence[str], token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of completions that the trainer sampled; see `completion_texts`."""
        return completion_texts(self._tokenizer, [self.rows[row_id] for row_id in ids], token_ids)

    def score(
        self,
        ids: Sequence[str],
        completions: Sequence[Any],
        token_ids: Sequence[Sequence[int]],
        verdicts: Sequence[Verdict] | None = None,
        **extra_arguments: Any,
    ) -> ScoredBatch:
        """Score B completions of the rows with B ids.

        Args:
            completions: texts, or conversations that end with the answer.
            token_ids: the token ids of the completions, with the EOS token.
            verdicts: the verdicts on the B completions; by default, those of the task's `check`.
            extra_arguments: further arguments that the trainer passes to rewards, such as `trainer_state`.

        Raises:
            RewardError: a reward failed.
            RunError: a task's `check` failed.

        Source: `GRPOTrainer._calculate_rewards`, TRL 1.14.2.
        """
        rows = [self.rows[row_id] for row_id in ids]
        prompts = [self._prompts[row_id] for row_id in ids]
        completions_of_trl = [
            trl_completion(completion, prompt, row)
            for completion, prompt, row in zip(completions, prompts, rows, strict=True)
        ]

        # Each completion is graded once, and all rewards read the same verdicts.
        texts = [completion_text(completion) for completion in completions_of_trl]
        if verdicts is None:
            verdicts = grade_all(rows[0]["task"], texts, rows)

        # Rewards get each column of the rows as a list of B values, and the arguments that TRL passes.
        arguments: dict[str, Any] = {}
        for name in self._column_names:
            arguments[name] = [self._columns[row_id].get(name) for row_id in ids]
        arguments |= _WITHOUT_TRAINER
        arguments |= {
            "prompts": prompts,
            "completions": completions_of_trl,
            "completion_ids": list(token_ids),
            "verdicts": verdicts,
        }
        arguments |= extra_arguments

        # (rewards, B) values, then a dictionary of values for each completion.
        values_of_rewards = call_together([reward.function for reward in self.rewards], arguments)
        names = [reward.name for reward in self.rewards]
        values = [dict(zip(names, numbers, strict=True)) for numbers in zip(*values_of_rewards, strict=True)]
        weighted_sums = [self._weighted_sum(values_by_name) for values_by_name in values]
        return ScoredBatch(rows, texts, token_ids, verdicts, values, weighted_sums)

    def _weighted_sum(self, values: Mapping[str, float | None]) -> float | None:
        if all(value is None for value in values.values()):
            return None
        return sum(reward.weight * (values[reward.name] or 0.0) for reward in self.rewards)


def completion_texts(tokenizer: Any, rows: Sequence[Row], token_ids: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of B completions of B rows.

    If the prompt of a row contains the beginning of the answer, the text begins with it; see `prompts/thoughts.py`.
    """
    begun_texts = [chat.begun_in(chat.render_row(tokenizer, row), row) for row in rows]
    sampled_texts = thoughts.decode(tokenizer, token_ids)
    return [begun + sampled for begun, sampled in zip(begun_texts, sampled_texts, strict=True)]


def graded(
    task: str, rows: Sequence[Row], reward: RewardFunction = correct_answer, tokenizer: Any = None
) -> RewardFunction:
    """Return a reward function for TRL's trainer, whose dataset has the column `id`.

    A completion of a plain prompt ends before the next line that begins with `Question:`, as in evaluations.

    Args:
        task: name or file of the task that grades completions.
        rows: the task's rows. A completion is graded against the row with its `id`.
        reward: returns rewards from verdicts; by default, the score of the task's `check`.
        tokenizer: for a model that thinks. TRL's texts lack `<think>` if the chat template has opened the thought, and
            markers that are special tokens.
    """
    row_by_id = {row["id"]: row for row in rows}

    @functools.wraps(reward)
    def score(completions: Sequence[Any], id: Sequence[str], **columns: Any) -> list[float | None]:
        completed_rows = [row_by_id[row_id] for row_id in id]
        texts = [completion_text(completion) for completion in completions]
        if tokenizer is not None:
            texts = completion_texts(tokenizer, completed_rows, columns["completion_ids"])
        if all(isinstance(completion, str) for completion in completions):  # TRL samples beyond the next question
            texts = [trl_completion(text, "", row) for text, row in zip(texts, completed_rows, strict=True)]
            completions = [trl_completion(text, "", row) for text, row in zip(completions, completed_rows, strict=True)]
        verdicts = grade_all(task, texts, completed_rows)
        return asynchronous.finished(reward(completions=completions, id=id, verdicts=verdicts, **columns))

    return score
