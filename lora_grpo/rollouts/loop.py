"""The loop of all rollouts and evaluations: the model's turns alternate with the environment of the row."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lora_grpo.grading import Row
from lora_grpo.prompts import chat, turns
from lora_grpo.rollouts.episode import Episode
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
    texts = [chat.render_row(sampler.tokenizer, row) for row in rows]
    prompts = sampler.encode(texts)
    group = params.num_samples
    if rows and all(chat.asks_in_plain_text(sampler.tokenizer, row) for row in rows):
        params = replace(params, ends_at_next_question=True)
    form = turns.response_format(sampler.tokenizer) if rows and rows[0].get("tools") else None

    def begin(place: int) -> Episode:
        ids, budget = prompts[place], params.max_tokens
        return Episode(rows[place], texts[place], ids, sampler.tokenizer, sampler.eos_token_ids, budget, form)

    if not rows or "reset_text" not in rows[0]:
        for place, samples in sampler.stream(prompts, params, seeds):
            episodes = [begin(place) for _ in samples]
            for episode, sample in zip(episodes, samples, strict=True):
                _take(episode, sample)
            yield place, episodes
        return
    # The cache of a conversation is kept between turns, so all conversations of a call must fit in memory.
    most = len(rows) if sampler.streams or not sampler.batch_size else max(1, sampler.batch_size // group)
    for start in range(0, len(rows), most):
        places = range(start, min(start + most, len(rows)))
        groups = [[begin(place) for _ in range(group)] for place in places]
        for place in _converse(sampler, groups, params, seeds[start * group : places.stop * group]):
            yield start + place, groups[place]


def _converse(
    sampler: Sampler, groups: Sequence[list[Episode]], params: SamplingParams, seeds: Sequence[int]
) -> Iterator[int]:
    """Play groups of new episodes together, and yield the index of each group when its episodes are over."""
    everyone, group = [*itertools.chain(*groups)], params.num_samples
    limit, alive = min(params.max_turn_tokens or params.max_tokens, params.max_tokens), [*range(len(everyone))]
    asked, given = [one.prompt_ids for one, *_ in groups], replace(params, max_tokens=limit, continues=())
    for turn in itertools.count():
        episodes = [everyone[index] for index in alive]
        own = [completion_seed(seeds[index], "turn", turn) if turn else seeds[index] for index in alive]
        for place, samples in sampler.stream(asked, given, own):
            for episode, sample in zip(episodes[place * given.num_samples :], samples, strict=False):
                _take(episode, sample)
        going_on = tuple(number for number, episode in enumerate(episodes) if not episode.is_over)
        before, alive = {index // group for index in alive}, [alive[number] for number in going_on]
        yield from sorted(before - {index // group for index in alive})
        if not alive:
            return
        asked = [everyone[index].prompt_ids + everyone[index].token_ids for index in alive]
        rooms = tuple(min(limit, everyone[index].remaining_tokens) for index in alive)
        given = replace(params, num_samples=1, max_tokens=max(rooms), max_each=rooms, continues=going_on)


def _take(episode: Episode, sample: SampledTokens) -> None:
    """Add a sampled turn to an episode."""
    episode.take(sample.token_ids, sample.text, sample.logprobs, sample.truncated, sample.asked_next_question)


def fit_batch(sampler: Sampler, rows: Sequence[Row], params: SamplingParams) -> None:
    """Set how many episodes of the rows fit in memory. The caches of a turn and of the next one exist together."""
    texts = [chat.render_row(sampler.tokenizer, row) for row in rows]
    sampler.fit_batch(texts, params.max_tokens, 2 if "reset_text" in rows[0] else 1)


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
