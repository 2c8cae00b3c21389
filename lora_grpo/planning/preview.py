"""`--preview`: samples a few groups from the base model, with the prompts of the first training steps."""

from __future__ import annotations

import sys

from lora_grpo.config import RunConfig
from lora_grpo.errors import UserError
from lora_grpo.models import load_policy
from lora_grpo.planning.preview_groups import Answer, Group
from lora_grpo.planning.preview_page import show
from lora_grpo.rewards import RewardError, Scorer, parse_reward_specs, resolve
from lora_grpo.sampling import Sampler, SamplingParams, build_sampler, completion_seed
from lora_grpo.tasks import (
    CheckError,
    Data,
    Row,
    chat,
    fit_to_context,
    prompt_order,
    split_validation,
)

PROMPTS = 8
"""Number of sampled groups."""


def preview(config: RunConfig, data: Data) -> None:
    """Sample completions of the first training prompts from the base model and print the result. Writes no files."""
    policy = load_policy(config)
    rows, _ = split_validation(fit_to_context(data.train, policy.tokenizer, config, "train"), config)
    sampler = build_sampler(policy, config)
    try:
        groups = sample_groups(config, sampler, rows)
    except (CheckError, RewardError) as error:  # there is no run that failed
        raise UserError(str(error)) from None
    finally:
        sampler.close()
    show(config, groups)


def sample_groups(config: RunConfig, sampler: Sampler, rows: list[Row]) -> list[Group]:
    """Sample and score at most PROMPTS groups from the base model, each from a different row.

    They use the prompts and seeds of the first training steps. Groups of the first step equal those in training.
    """
    order = prompt_order(len(rows), min(PROMPTS, len(rows)), config.seed)
    scorer = Scorer(resolve(parse_reward_specs(config.rewards)), sampler.tokenizer, rows)
    settings, size = config.sampling, config.sampling.num_generations
    prompts = [chat.render_row(sampler.tokenizer, rows[index]) for index in order]
    print(f"sampling {len(prompts)} prompts x {size} completions from {config.model.name}", file=sys.stderr)
    params = SamplingParams(size, settings.temperature, settings.top_p, settings.max_completion_tokens)
    per_step = config.train.prompts_per_step * size
    steps = [divmod(index, per_step) for index in range(len(prompts) * size)]
    seeds = [completion_seed(config.seed, f"step {step}", index) for step, index in steps]
    adapter = config.lora.from_ is not None
    samples = [each for group in sampler.sample(prompts, params, seeds, adapter=adapter) for each in group]
    ids = [rows[index]["id"] for index in order for _ in range(size)]
    batch = scorer.score(ids, [each.text for each in samples], [each.token_ids for each in samples])
    weights = {reward.name: reward.weight for reward in scorer.rewards}
    answers = []
    for sample, value, verdict in zip(samples, batch.values, batch.verdicts, strict=True):
        weighted = {name: None if each is None else weights[name] * each for name, each in value.items()}
        answers.append(Answer(sample.text, len(sample.token_ids), sample.truncated, weighted, verdict))
    return [Group(rows[index], tuple(answers[n * size : (n + 1) * size])) for n, index in enumerate(order)]
