"""`--preview`: samples a few groups from the base model, and prints their rewards and a verdict."""

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
"""Number of sampled groups."""


def preview(config: RunConfig, data: Data) -> None:
    """Sample completions of the first training prompts from the base model and print the result. Writes no files.

    Raises:
        UserError: the model cannot be loaded, or too few rows fit in its context.
        RewardError: a reward function failed.
    """
    policy = load_policy(config)
    rows, _ = split_validation(fit_to_context(data.train, policy.tokenizer, config, "train"), config)
    sampler = build_sampler(policy, config)
    try:
        groups = sample_groups(config, sampler, rows)
    finally:
        sampler.close()
    show(config, groups)


def sample_groups(config: RunConfig, sampler: Sampler, rows: list[Row]) -> list[Group]:
    """Sample and score groups from the base model, with the prompts and seeds of the first training steps.

    Args:
        config: the run.
        sampler: sampler of the run's policy.
        rows: training rows with `prompt`.

    Returns:
        At most PROMPTS groups, each from a different row. Groups of the first step equal those sampled in training.
    """
    order = prompt_order(len(rows), min(PROMPTS, len(rows)), config.seed)
    # Collect columns from all rows, because a reward may use a column that these few rows lack.
    columns = trl_rows(sampler.tokenizer, rows)
    chosen, size = [columns[index] for index in order], config.sampling.num_generations
    prompts = [chat.render_row(sampler.tokenizer, rows[index]) for index in order]
    per_step = config.train.prompts_per_step * size
    print(f"sampling {len(prompts)} prompts x {size} completions from {config.model.name}", file=sys.stderr)
    settings = config.sampling
    params = SamplingParams(size, settings.temperature, settings.top_p, settings.max_completion_tokens)
    steps = [divmod(index, per_step) for index in range(len(prompts) * size)]
    seeds = [completion_seed(config.seed, f"step {step}", index) for step, index in steps]
    samples = [each for group in sampler.sample(prompts, params, seeds, adapter=False) for each in group]
    repeated, texts = [row for row in chosen for _ in range(size)], [each.text for each in samples]
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
        for row, start in zip(chosen, range(0, len(answers), size), strict=True)
    ]
