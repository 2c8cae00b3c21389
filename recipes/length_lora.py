"""The smallest GRPO: learn to answer in a given number of characters.

Method. Any prompts; the only reward is 1 at the target length and falls off with the distance from it. Nothing is
right or wrong, so there is nothing to evaluate: the reward curve is the result.

    python recipes/length_lora.py --rewards near_length:80
    python recipes/length_lora.py --data.train my_prompts.txt
"""

import sys

from lora_grpo.command_line import parse, run_command
from lora_grpo.conclude import conclude
from lora_grpo.data import fit_to_context, load_data
from lora_grpo.difficulty import keep_middling
from lora_grpo.dry_run import dry_run
from lora_grpo.held_out import hold_out
from lora_grpo.plan import make_plan
from lora_grpo.plan_report import show_plan
from lora_grpo.policy import load_policy
from lora_grpo.preview import preview
from lora_grpo.run_record import open_run
from lora_grpo.train import make_trainer, train

PRESETS = {
    "starter": {
        "data": {"task": "prompts"},
        "sampling": {"num_generations": 8, "max_completion_tokens": 64},
        "rewards": ("near_length:120",),
        "train": {"max_steps": 40, "micro_batch_size": 32, "learning_rate": 1e-3, "lr_scheduler": "constant"},
    },
    "8gb": {
        "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct"},
        "data": {"task": "prompts"},
        "rewards": ("near_length:400",),
        "train": {"max_steps": 100, "gradient_checkpointing": True, "optimizer": "adamw_8bit"},
    },
}


def main() -> None:
    config, how = parse(sys.argv[1:], recipe="length_lora", description=__doc__, presets=PRESETS)
    config, plan = make_plan(config, how)
    if how.plan:
        return show_plan(plan)
    data = load_data(config)
    if how.dry_run:
        return dry_run(config, data)
    if how.preview:
        return preview(config, data)

    run = open_run(config, how, "length_lora", data.record, plan)
    policy = load_policy(config)
    rows = fit_to_context(data.train, policy.tokenizer, config, "train")
    rows, watched_rows = hold_out(rows, config)
    sampler = policy.sampler(config)
    trainer = make_trainer(run, policy, rows, sampler, watched_rows)
    run.begin(policy.record)
    keep_middling(run, sampler, trainer, rows)
    train(run, policy, trainer)
    conclude(run)


if __name__ == "__main__":
    sys.exit(run_command(main))
