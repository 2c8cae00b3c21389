"""`--preview` samples a few groups from the base model; `--dry-run` prints what needs no model weights."""

from __future__ import annotations

import sys
from typing import Any

from lora_grpo.config import RunConfig, batch_shape
from lora_grpo.errors import UserError
from lora_grpo.models import base_model, load_policy, prepare_tokenizer, start_folder
from lora_grpo.planning.preview_groups import Answer, Group
from lora_grpo.planning.preview_page import show
from lora_grpo.rewards import RewardError, Scorer, parse_reward_specs, resolve
from lora_grpo.sampling import Sampler, SamplingParams, build_sampler, completion_seed
from lora_grpo.tasks import (
    CheckError,
    Data,
    Row,
    TaskFile,
    chat,
    fit_to_context,
    get_task,
    gold_tokens,
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
    for each, earned, verdict in zip(samples, batch.values, batch.verdicts, strict=True):
        weighted = {name: None if value is None else weights[name] * value for name, value in earned.items()}
        answers.append(Answer(each.text, len(each.token_ids), each.truncated, weighted, verdict))
    return [Group(rows[index], tuple(answers[n * size : (n + 1) * size])) for n, index in enumerate(order)]


def show_settings(config: RunConfig) -> None:
    """Print the settings as YAML for `--config`."""
    import yaml

    print(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True), flush=True)


def dry_run(config: RunConfig, data: Data, *, resumed: bool = False) -> None:
    """Print one rendered prompt, and the rewards of its reference answer."""
    tokenizer = base_model.load_tokenizer(config.model)
    prepare_tokenizer(tokenizer, config, start_folder(config, resumed=resumed))
    rows = fit_to_context(data.train, tokenizer, config, "train")
    evaluation = fit_to_context(data.eval, tokenizer, config, "eval")
    scorer = Scorer(resolve(parse_reward_specs(config.rewards)), tokenizer, rows)
    print(f"--- prompt of {rows[0]['id']}\n{chat.render_row(tokenizer, rows[0])}")
    task = get_task(config.data.task)
    shape = batch_shape(config)
    steps = f"{config.step_limit} steps" if config.step_limit else f"as many steps as fit in {config.hours:g} h"
    passes = f"in {shape.accumulation_steps} passes"
    counts = f"{len(rows)} training rows, {len(evaluation)} evaluation rows; nothing was trained"
    if config.method == "sft":
        print(f"--- reference answer\n{task.gold(rows[0])}")
        tokens = len(gold_tokens(tokenizer, rows[:1], config)[0]) + 1
        print(f"--- {tokens} tokens with its end: the loss is on these, not on the prompt")
        print(f"--- {steps} of {shape.completions_per_step} gold solutions, {passes}; {counts}")
        return
    if isinstance(task, TaskFile) and not task.has_gold:
        print(f"--- no reference answer: {task.path.name} defines no gold(row)")
    else:
        _show_gold(task.gold(rows[0]), scorer, rows[0], tokenizer)
    print(
        f"--- {steps} of {config.train.prompts_per_step} prompts x "
        f"{config.sampling.num_generations} generations = {shape.completions_per_step} completions, {passes}; {counts}"
    )


def _show_gold(gold: str, scorer: Scorer, row: Row, tokenizer: Any) -> None:
    """Print a reference answer and its rewards."""
    print(f"--- reference answer\n{gold}\n--- its rewards")
    batch = scorer.score([row["id"]], [gold], [tokenizer(gold, add_special_tokens=False)["input_ids"]])
    for reward in scorer.rewards:
        value = batch.values[0][reward.name]
        print(f"{reward.name:24} {'not gradable' if value is None else f'{value:g} of 1, weight {reward.weight:g}'}")
    print(f"{'sum':24} {batch.rewards[0]:g}")
