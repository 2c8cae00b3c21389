"""Episodes of agents: programs outside this process play them, and the sampler answers what they ask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from lora_grpo import agents
from lora_grpo.endpoint import EpisodeLimits, Policy
from lora_grpo.grading import Row
from lora_grpo.rollouts.episode import Episode
from lora_grpo.rollouts.token_tree import ModelCall, tree_row
from lora_grpo.sampling import RequestQueue, Sampler, SamplingParams
from lora_grpo.tasks import get_task, loaded_columns

_MAX_LIVE_EPISODES = 64
"""Number of episodes that are played at the same time, unless memory has less room."""
_PATIENCE = 3.0
"""Seconds that the others wait for an agent before the model goes on without it. If every agent is faster, what is
sampled together does not depend on time, and a resumed run samples the same tokens."""


def play_agents(
    sampler: Sampler, rows: Sequence[Row], params: SamplingParams, seeds: Sequence[int]
) -> Iterator[tuple[int, list[Episode]]]:
    """Yield (index of the row, its G episodes). The sampler must be awake. See `loop.play` for the arguments.

    Raises:
        RunError: more agents failed than the task file allows.
        UserError: the task file or the command of its agent cannot be started.
    """
    definition = get_task(rows[0]["task"]).agent
    assert definition is not None
    pool = agents.pool_of(definition)
    group_size = params.num_samples
    limits = EpisodeLimits(
        temperature=params.temperature,
        top_p=params.top_p,
        prompt_tokens=definition.prompt_tokens,
        budget=params.max_tokens,
        turn_tokens=params.turn_limit,
    )

    episodes_at_once = sampler.batch_size or _MAX_LIVE_EPISODES
    rows_at_once = max(1, min(episodes_at_once, _MAX_LIVE_EPISODES) // group_size)
    for first in range(0, len(rows), rows_at_once):
        indices = range(first, min(first + rows_at_once, len(rows)))
        jobs = []
        for index in indices:
            for seed in seeds[index * group_size : (index + 1) * group_size]:
                jobs.append(agents.Job(loaded_columns(rows[index]), seed))

        # The agents begin in processes of their own. This thread samples what they ask for until the last one is over.
        queue = RequestQueue(patience=_PATIENCE)
        policy = Policy(sampler.tokenizer, sampler.eos_token_ids, sampler.encode, queue)
        playing = pool.start(jobs, policy, limits)
        try:
            sampler.serve(queue)
            played = playing.result()
        except BaseException:
            queue.fail(RuntimeError("the run has ended"))
            playing.cancel()
            with contextlib.suppress(Exception):
                pool.close()  # the agents of the other episodes
            raise
        agents.check_failures(pool.counts, definition, pool.log)

        for index in indices:
            start = (index - first) * group_size
            group = [_episode(sampler, rows[index], result, params) for result in played[start : start + group_size]]
            yield index, group


def _episode(sampler: Sampler, row: Row, played: agents.Played, params: SamplingParams) -> Episode:
    """Return an episode that is over."""
    ended_by = "reply"
    if played.failure:
        ended_by = "failure"
    elif played.ran_out_of_tokens:
        ended_by = "budget"
    episode = Episode(
        row=row,
        prompt="",
        prompt_ids=[],
        tokenizer=sampler.tokenizer,
        eos_token_ids=sampler.eos_token_ids,
        budget=params.max_tokens,
        verdict=played.verdict,
        agent=played,
        turns=len(played.calls),
        ended_by=ended_by,
    )
    if not played.calls:
        # The agent failed before the model was asked. A row needs a token, which is not trained on.
        [episode.prompt_ids] = sampler.encode([row["question"]])
        episode.token_ids = [sampler.eos_token_ids[0]]
        episode.loss_mask = [0]
        episode.logprobs = [0.0]
        episode.messages = [{"role": "user", "content": row["question"]}]
        return episode

    calls = [ModelCall(call.context_ids, call.token_ids, call.logprobs) for call in played.calls]
    tree = tree_row(calls)
    episode.prompt_ids = tree.prompt_ids
    episode.token_ids = tree.token_ids
    episode.loss_mask = tree.loss_mask
    episode.logprobs = tree.logprobs
    episode.predecessors = tree.predecessors
    last_call = played.calls[-1]
    episode.truncated = last_call.truncated or played.ran_out_of_tokens
    episode.asked_next_question = last_call.asked_next_question
    episode.messages = last_call.messages
    return episode
