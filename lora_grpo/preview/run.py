"""`--preview`: a handful of groups from the base, what they earn, and whether GRPO can learn from them."""

from __future__ import annotations

import sys

from lora_grpo.config import RunConfig
from lora_grpo.models import load_policy
from lora_grpo.preview.groups import Answer, Group
from lora_grpo.preview.page import show
from lora_grpo.rewards import parse_reward_specs, resolve, score, trl_rows
from lora_grpo.sampling import Sampler, SamplingParams, build_sampler, completion_seed
from lora_grpo.tasks import UNGRADED_TASKS, Data, Row, chat, fit_to_context, grade_all, prompt_order, split_validation

PROMPTS = 8
"""Groups that are sampled: a training step's worth."""


def preview(config: RunConfig, data: Data) -> None:
    """Sample the prompts that training would ask first, and print what they come to; nothing is written.

    Raises:
        UserError: the model cannot be loaded, or too few rows fit its context.
        RewardError: a reward function failed.
    """
    policy = load_policy(config)
    rows, _ = split_validation(fit_to_context(data.train, policy.tokenizer, config, "train"), config)
    sampler = build_sampler(policy, config)
    try:
        groups = draw_groups(config, sampler, rows)
    finally:
        sampler.close()
    show(config, groups)


def draw_groups(config: RunConfig, sampler: Sampler, rows: list[Row]) -> list[Group]:
    """Sample groups of the base as the first steps of training would, and give them their rewards.

    Args:
        config: the run.
        sampler: draws from its policy.
        rows: training rows with `prompt`.

    Returns:
        At most PROMPTS groups, of different rows. The first step's completions are those that training draws.
    """
    order = prompt_order(len(rows), min(PROMPTS, len(rows)), config.seed)
    # All rows are asked for their columns: a reward may read one that these few lack.
    columns = trl_rows(sampler.tokenizer, rows)
    asked, size = [columns[place] for place in order], config.sampling.num_generations
    prompts = [chat.render_row(sampler.tokenizer, rows[place]) for place in order]
    a_step = config.train.prompts_per_step * size
    print(f"sampling {len(prompts)} prompts x {size} completions from {config.model.name}", file=sys.stderr)
    settings = config.sampling
    params = SamplingParams(size, settings.temperature, settings.top_p, settings.max_completion_tokens)
    seeds = [
        completion_seed(config.seed, f"step {index // a_step}", index % a_step) for index in range(len(prompts) * size)
    ]
    samples = [each for group in sampler.sample(prompts, params, seeds, adapter=False) for each in group]
    repeated, texts = [row for row in asked for _ in range(size)], [each.text for each in samples]
    rewards = resolve(parse_reward_specs(config.rewards))
    values = score(rewards, repeated, texts, [each.token_ids for each in samples])
    task = config.data.task
    verdicts = [None] * len(texts) if task in UNGRADED_TASKS else grade_all(task, texts, repeated)
    answers = [
        Answer(each.text, len(each.token_ids), each.truncated, earned, verdict)
        for each, earned, verdict in zip(samples, values, verdicts, strict=True)
    ]
    weights = {reward.name: reward.weight for reward in rewards}
    return [
        Group(row, weights, tuple(answers[start : start + size]))
        for row, start in zip(asked, range(0, len(answers), size), strict=True)
    ]
