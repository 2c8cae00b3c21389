"""Training on episodes whose calls do not extend each other: each call is scored as it was sampled."""

import pytest
from helpers.tiny_runs import TINY, run_tiny

from lora_grpo.monitoring import LARGEST_LOGPROB_MISMATCH
from lora_grpo.prompts import chat
from lora_grpo.rollouts import Episode, ModelCall, tree_row
from lora_grpo.runs import read_metrics
from lora_grpo.sampling import SamplingParams
from lora_grpo.training import fast_trainer

CALL_TOKENS = 12


def play_trees(episodes_of_steps):
    """Return a function that plays episodes of three calls: one that is rewritten, and one that goes on after it.

    In every fourth episode, there is only the first call.
    """

    def play(sampler, rows, params, seeds):
        rows_of_episodes = [row for row in rows for _ in range(params.num_samples)]
        prompts = [chat.render_row(sampler.tokenizer, row) for row in rows_of_episodes]

        def calls_with(contexts, first_seed):
            call_params = SamplingParams(1, params.temperature, params.top_p, CALL_TOKENS)
            groups = sampler.sample(contexts, call_params, [seed + first_seed for seed in seeds])
            calls = []
            for context, [answer] in zip(contexts, groups, strict=True):
                calls.append(ModelCall(context, answer.token_ids, answer.logprobs))
            return calls

        with sampler.awake(adapter=True):
            first_calls = calls_with(sampler.encode(prompts), 0)
            rewritten_contexts = [[*call.context_ids[:5], 7, *call.token_ids[:3]] for call in first_calls]
            second_calls = calls_with(rewritten_contexts, 1)
            third_calls = calls_with([[*call.context_ids, *call.token_ids, 8] for call in second_calls], 2)

        episodes = []
        for index, calls in enumerate(zip(first_calls, second_calls, third_calls, strict=True)):
            tree = tree_row(calls[:1] if index % 4 == 3 else calls)
            episode = Episode(
                rows_of_episodes[index],
                prompts[index],
                tree.prompt_ids,
                sampler.tokenizer,
                sampler.eos_token_ids,
                params.max_tokens,
                token_ids=tree.token_ids,
                loss_mask=tree.loss_mask,
                logprobs=tree.logprobs,
                predecessors=tree.predecessors,
                messages=[{"role": "assistant", "content": sampler.tokenizer.decode(calls[0].token_ids)}],
                turns=len(calls),
                ended_by="reply",
            )
            episodes.append(episode)
        episodes_of_steps.append(episodes)
        firsts = range(0, len(episodes), params.num_samples)
        return [episodes[first : first + params.num_samples] for first in firsts]

    return play


@pytest.mark.parametrize(
    ("settings", "grpo"),
    [
        ({}, ()),
        ({"beta": 0.05}, ("num_iterations=2", "pad_to_multiple_of=8", "loss_type=grpo")),
    ],
    ids=["defaults", "old and reference logprobs"],
)
def test_the_logprobs_of_every_call_are_those_of_the_sampler(settings, grpo, tmp_path, monkeypatch):
    """In the loss, in the logprobs of the policy that sampled, and in those of the reference."""
    episodes_of_steps = []
    monkeypatch.setattr(fast_trainer, "play_all", play_trees(episodes_of_steps))
    rewards = ("near_length:20",)
    run, _ = run_tiny(tmp_path / "run", train={**TINY["train"], **settings}, grpo=grpo, rewards=rewards)
    steps = read_metrics(run.folder)
    assert len(steps) == 3
    for step in steps:
        assert step.get(LARGEST_LOGPROB_MISMATCH, 0) < 1e-4
    assert steps[0][LARGEST_LOGPROB_MISMATCH] >= 0

    first_step, episodes = steps[0], episodes_of_steps[0]
    assert [episode.predecessors is None for episode in episodes] == [False, False, False, True] * 2
    assert first_step["completions/max_length"] == max(sum(episode.loss_mask) for episode in episodes)
    assert max(step["grad_norm"] for step in steps) > 0
    if "beta" in settings:
        assert first_step["kl"] == pytest.approx(0, abs=1e-8)  # a new adapter changes nothing
        assert steps[-1]["kl"] > 1e-6
