"""`--dry-run`: prints the settings, one prompt and the rewards of its reference answer, without model weights."""

from __future__ import annotations

import json

from lora_grpo.config import RunConfig, batch_shape
from lora_grpo.models import base_model
from lora_grpo.rewards import parse_reward_specs, resolve, score, trl_rows
from lora_grpo.tasks import Data, chat, fit_to_context, get_task


def dry_run(config: RunConfig, data: Data) -> None:
    """Print the settings as YAML for `--config`, one rendered prompt, and the rewards of its reference answer."""
    import yaml

    settings = json.loads(json.dumps(config.to_dict()))  # YAML needs lists instead of tuples
    print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    tokenizer = base_model.load_tokenizer(config.model)
    rows = fit_to_context(data.train, tokenizer, config, "train")
    evaluation = fit_to_context(data.eval, tokenizer, config, "eval")
    row = rows[0]
    gold = get_task(config.data.task).gold_completion(row)
    print(f"--- prompt of {row['id']}\n{chat.render_row(tokenizer, row)}")
    print(f"--- reference answer\n{gold}\n--- its rewards")
    rewards = resolve(parse_reward_specs(config.rewards))
    (values,) = score(
        rewards, trl_rows(tokenizer, rows)[:1], [gold], [tokenizer(gold, add_special_tokens=False)["input_ids"]]
    )
    total = 0.0
    for reward in rewards:
        value = values[reward.name]
        total += reward.weight * (value or 0.0)
        print(f"{reward.name:24} {'not gradable' if value is None else f'{value:g} of 1, weight {reward.weight:g}'}")
    shape = batch_shape(config)
    print(
        f"{'sum':24} {total:g}\n--- {config.train.max_steps} steps of {config.train.prompts_per_step} prompts x "
        f"{config.sampling.num_generations} generations = {shape.completions_per_step} completions, in "
        f"{shape.accumulation_steps} passes; {len(rows)} training rows, {len(evaluation)} evaluation rows; "
        "nothing was trained"
    )
