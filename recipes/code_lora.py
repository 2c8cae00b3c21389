"""Python functions with LoRA + GRPO: the reward runs unit tests in a sandbox; train, evaluate before and after.

Method. The policy is a frozen 4-bit (NF4) base with a LoRA adapter on every linear layer. At each step it writes
num_generations programs for each of prompts_per_step problems; a program earns 1 if all of its problem's unit tests
pass and 0 if not, and GRPO raises the probability of the programs that did better than the others of their group.
Programs run where they can reach neither the tests that judge them nor anything of yours (lora_grpo/sandbox).

    python recipes/code_lora.py                      # preset chosen from the hardware
    python recipes/code_lora.py --preset 12gb        # Qwen2.5-Coder-1.5B-Instruct: from MBPP to HumanEval
    python recipes/code_lora.py --dry-run            # what would run; trains nothing
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


def gpu(model: str) -> dict:
    """Settings of a GPU preset: MBPP's 374 training problems, HumanEval held out, 128 completions a step."""
    return {
        "model": {"name": model, "max_sequence_tokens": 1280},
        "lora": {"rank": 32, "alpha": 64},
        "data": {"task": "mbpp", "eval_task": "humaneval", "prompt_style": "code"},
        "sampling": {"num_generations": 16, "max_completion_tokens": 512},
        "rewards": ("passes_tests=1.0",),
        "train": {
            "max_steps": 150,
            "prompts_per_step": 8,
            "learning_rate": 2e-5,
            "optimizer": "adamw_8bit",
            "gradient_checkpointing": True,
        },
        "eval": {"num_samples": 10, "k": (1, 10)},
    }


PRESETS = {
    "starter": {
        "data": {"task": "starter-code", "eval_limit": 400, "prompt_style": "code"},
        "sampling": {"num_generations": 16, "max_completion_tokens": 56},
        "rewards": ("passes_tests=1.0",),
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
    "8gb": gpu("Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    "12gb": gpu("Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    "16gb": gpu("Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    "24gb": gpu("Qwen/Qwen2.5-Coder-3B-Instruct"),
}


def main() -> None:
    config, how = parse(sys.argv[1:], recipe="code_lora", description=__doc__, presets=PRESETS)
    config, plan = make_plan(config, how)
    if how.plan:
        return show_plan(plan)
    data = load_data(config)  # starts the sandbox too, and says how programs are shut in
    if how.dry_run:
        return dry_run(config, data)
    if how.preview:
        return preview(config, data)

    run = open_run(config, how, "code_lora", data.record, plan)
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
