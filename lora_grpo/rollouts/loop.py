"""The loop of all rollouts and evaluations: the model's turns alternate with the environment of the row."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lora_grpo.grading import Row
from lora_grpo.prompts import chat, plain_text, turns
from lora_grpo.rollouts.episode import Episode, has_agent, has_environment
from lora_grpo.sampling import SampledTokens, Sampler, SamplingParams, completion_seed


def play(
    sampler: Sampler, rows: Sequence[Row], params: SamplingParams, seeds: Sequence[int]
) -> Iterator[tuple[int, list[Episode]]]:
    """Yield (index of the row, its G episodes) as soon as all of them are over. The sampler must be awake.

    Without an environment, an episode is one completion. Otherwise, all conversations take their turns together; those
    that are over leave the batch. The token ids of a conversation are extended, never tokenized again.

    Args:
        rows: B rows of one task with their prompts.
        params: with G episodes per row. `max_tokens` is the budget of an episode, `max_turn_tokens` that of a turn.
        seeds: B·G seeds. Each determines one episode: its first turn, and through `completion_seed` all later ones.
    """
    if not rows:
        return
    if has_agent(rows[0]):
        from lora_grpo.rollouts.agent_episodes import play_agents  # loads a web server

        yield from play_agents(sampler, rows, params, seeds)
        return
    group_size = params.num_samples
    prompts = [chat.render_row(sampler.tokenizer, row) for row in rows]
    prompt_ids = sampler.encode(prompts)
    tool_call_format = turns.response_format(sampler.tokenizer) if rows[0].get("tools") else None
    if all(plain_text.asks_in_plain_text(sampler.tokenizer, row) for row in rows):
        params = replace(params, ends_at_next_question=True)

    def new_group(index: int) -> list[Episode]:
        """Return the G episodes of a row, which start from the same prompt."""
        return [
            Episode(
                row=rows[index],
                prompt=prompts[index],
                prompt_ids=prompt_ids[index],
                tokenizer=sampler.tokenizer,
                eos_token_ids=sampler.eos_token_ids,
                budget=params.max_tokens,
                tool_call_format=tool_call_format,
            )
            for _ in range(group_size)
        ]

    # Without an environment, every episode is over after its first turn.
    if not has_environment(rows[0]):
        for index, samples in sampler.stream(prompt_ids, params, seeds):
            episodes = new_group(index)
            for episode, sample in zip(episodes, samples, strict=True):
                _take_turn(episode, sample)
            yield index, episodes
        return

    # The cache of a conversation is kept between turns, so all conversations of a call must fit in memory. Engines that
    # stream manage their memory themselves.
    rows_at_once = len(rows)
    if sampler.batch_size and not sampler.streams:
        rows_at_once = max(1, sampler.batch_size // group_size)
    for first in range(0, len(rows), rows_at_once):
        indices = range(first, min(first + rows_at_once, len(rows)))
        groups = [new_group(index) for index in indices]
        group_seeds = seeds[indices.start * group_size : indices.stop * group_size]
        for position in _converse(sampler, groups, params, group_seeds):
            yield first + position, groups[position]


def _converse(
    sampler: Sampler, groups: Sequence[list[Episode]], params: SamplingParams, seeds: Sequence[int]
) -> Iterator[int]:
    """Play groups of new episodes together, and yield the index of each group when its episodes are over.

    Args:
        groups: B groups of G episodes.
        seeds: B·G seeds.
    """
    group_size = params.num_samples
    episodes = [episode for group in groups for episode in group]
    unfinished = list(range(len(episodes)))  # indices into `episodes`; shrinks as conversations end

    # In the first turn, the G episodes of a group share one prompt, which the sampler reads once. The sampler keeps the
    # cache of each episode under its index, for the turns that follow.
    prompts = [group[0].prompt_ids for group in groups]
    turn_params = replace(params, max_tokens=params.turn_limit, keys=tuple(unfinished))
    for turn in itertools.count():
        # The seed of a turn depends on its episode alone, not on which other episodes are unfinished. The first turn
        # has the episode's own seed, as an episode without an environment does.
        turn_seeds = [seeds[index] for index in unfinished]
        if turn > 0:
            turn_seeds = [completion_seed(seed, "turn", turn) for seed in turn_seeds]

        # The model takes a turn in every unfinished episode, and their environments answer. The samples of all prompts,
        # one prompt after the other, are in the order of `unfinished`.
        for prompt_index, samples in sampler.stream(prompts, turn_params, turn_seeds):
            first_position = prompt_index * turn_params.num_samples
            for position, sample in enumerate(samples, start=first_position):
                _take_turn(episodes[unfinished[position]], sample)

        # The episodes that have another turn. Those that are over do not need their caches.
        still_unfinished = []
        for index in unfinished:
            if episodes[index].is_over:
                sampler.forget(index)
            else:
                still_unfinished.append(index)

        # A group is over when the last of its episodes is.
        groups_before = {index // group_size for index in unfinished}
        groups_now = {index // group_size for index in still_unfinished}
        yield from sorted(groups_before - groups_now)
        unfinished = still_unfinished
        if not unfinished:
            return

        # From now on, each episode is a prompt of its own: everything up to here. Its cache lacks only the last token
        # of its turn and those that the environment has added.
        prompts = [episodes[index].prompt_ids + episodes[index].token_ids for index in unfinished]
        token_limits = tuple(min(params.turn_limit, episodes[index].remaining_tokens) for index in unfinished)
        turn_params = replace(
            params,
            num_samples=1,
            max_tokens=max(token_limits),
            max_tokens_by_prompt=token_limits,
            continues=tuple(unfinished),
            keys=tuple(unfinished),
        )


def _take_turn(episode: Episode, sample: SampledTokens) -> None:
    """Add a sampled turn to an episode."""
    episode.take(sample.token_ids, sample.text, sample.logprobs, sample.truncated, sample.asked_next_question)


def fit_batch(sampler: Sampler, rows: Sequence[Row], params: SamplingParams) -> None:
    """Set how many episodes of the rows the sampler decodes at once, so that they fit in memory."""
    prompts: Any = [chat.render_row(sampler.tokenizer, row) for row in rows]
    if has_agent(rows[0]):  # which makes its own prompt
        prompts = [[0] * rows[0]["prompt_tokens"]]
    # When a turn of a conversation begins, the cache of the turn before is copied, so both exist for a moment.
    caches_per_episode = 2 if has_environment(rows[0]) or has_agent(rows[0]) else 1
    sampler.fit_batch(prompts, params.max_tokens, caches_per_episode)


def play_all(
    sampler: Sampler, rows: Sequence[Row], params: SamplingParams, seeds: Sequence[int], *, adapter: bool = True
) -> list[list[Episode]]:
    """Return the G episodes of each of B rows. See `play` for the arguments.

    Args:
        adapter: if False, sample from the base model.
    """
    import torch

    with sampler.awake(adapter=adapter):
        if not rows:  # a process that has no rows
            return []
        if torch.cuda.is_available():
            fit_batch(sampler, rows, params)
        groups = dict(play(sampler, rows, params, seeds))
    return [groups[index] for index in range(len(rows))]
