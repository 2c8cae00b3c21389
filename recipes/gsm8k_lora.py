"""Grade-school maths with LoRA + GRPO: train, evaluate before and after, keep the adapter.

Method. The policy is a frozen 4-bit (NF4) base with a LoRA adapter on every linear layer. At each step it answers
prompts_per_step problems num_generations times; an answer earns the sum of the rewards below; GRPO raises the
probability of what earned more than the other answers to the same problem. The reward of a correct answer dominates;
the smaller ones teach the format that the grader reads.

    python recipes/gsm8k_lora.py                     # preset chosen from the hardware
    python recipes/gsm8k_lora.py --preset 16gb       # Qwen2.5-1.5B-Instruct on openai/gsm8k
    python recipes/gsm8k_lora.py --plan              # memory, work and time, before anything is downloaded
    python recipes/gsm8k_lora.py --dry-run           # what would run; trains nothing
"""

import sys

from lora_grpo.command_line import parse, run_command
from lora_grpo.conclude import conclude
from lora_grpo.data import fit_to_context, load_data
from lora_grpo.difficulty import keep_middling
from lora_grpo.dry_run import dry_run
from lora_grpo.evaluate import evaluate
from lora_grpo.held_out import hold_out
from lora_grpo.plan import make_plan
from lora_grpo.plan_report import show_plan
from lora_grpo.policy import load_policy
from lora_grpo.preview import preview
from lora_grpo.run_record import open_run
from lora_grpo.train import make_trainer, train

REWARDS = (
    "correct_answer=2.0",
    "integer_answer=0.5",
    "strict_xml_format=0.5",
    "soft_xml_format=0.5",
    "xml_tag_count=0.5",
)


def gpu(model: str) -> dict:
    """Settings of a GPU preset: GSM8K from the Hub, 64 completions of up to 512 tokens a step."""
    return {
        "model": {"name": model, "max_sequence_tokens": 1024},
        "lora": {"rank": 32, "alpha": 64},
        "data": {"task": "gsm8k", "eval_limit": 500},
        "sampling": {"num_generations": 8, "max_completion_tokens": 512},
        "rewards": REWARDS,
        "train": {
            "max_steps": 250,
            "prompts_per_step": 8,
            "learning_rate": 2e-5,
            "optimizer": "adamw_8bit",
            "gradient_checkpointing": True,
        },
        "eval": {"num_samples": 4, "k": (1, 4)},
    }


PRESETS = {
    "starter": {
        "data": {"task": "starter", "eval_limit": 400},
        "sampling": {"num_generations": 16, "max_completion_tokens": 64},
        "rewards": REWARDS,
        "train": {
            "max_steps": 60,
            "prompts_per_step": 8,
            "micro_batch_size": 32,
            "learning_rate": 5e-4,
            "lr_scheduler": "constant",
            "warmup_steps": 0,
            "max_grad_norm": 1.0,
        },
    },
    "8gb": gpu("Qwen/Qwen2.5-0.5B-Instruct"),
    "12gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "16gb": gpu("Qwen/Qwen2.5-1.5B-Instruct"),
    "24gb": gpu("Qwen/Qwen2.5-3B-Instruct"),
}


def main() -> None:
    config, how = parse(sys.argv[1:], recipe="gsm8k_lora", description=__doc__, presets=PRESETS)
    config, plan = make_plan(config, how)
    if how.plan:
        return show_plan(plan)
    data = load_data(config)
    if how.dry_run:
        return dry_run(config, data)
    if how.preview:
        return preview(config, data)

    run = open_run(config, how, "gsm8k_lora", data.record, plan)
    policy = load_policy(config)
    train_rows = fit_to_context(data.train, policy.tokenizer, config, "train")
    train_rows, watched_rows = hold_out(train_rows, config)
    eval_rows = fit_to_context(data.eval, policy.tokenizer, config, "eval")
    sampler = policy.sampler(config)
    trainer = make_trainer(run, policy, train_rows, sampler, watched_rows)
    run.begin(policy.record)

    before = evaluate(run, sampler, eval_rows, "base")
    keep_middling(run, sampler, trainer, train_rows)
    train(run, policy, trainer)
    after = evaluate(run, sampler, eval_rows, "trained")
    conclude(run, before, after)


if __name__ == "__main__":
    sys.exit(run_command(main))
