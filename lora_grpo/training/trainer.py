"""Build TRL's GRPOTrainer or SFTTrainer from the configuration, policy, rows and rewards of a run."""

import types
from collections.abc import Sequence
from typing import Any

from lora_grpo.config import UNREAD_FIELDS, parse_grpo_overrides
from lora_grpo.data import prompt_order, sft_command
from lora_grpo.errors import RunError, UserError
from lora_grpo.grading import Row
from lora_grpo.models import Policy, base_model
from lora_grpo.progress import Progress
from lora_grpo.prompts import chat, template_variables
from lora_grpo.rewards import Reward, Scorer, parse_reward_specs, resolve, training_set
from lora_grpo.runs import Run
from lora_grpo.sampling import Sampler, SharedVllmSampler, VllmSampler
from lora_grpo.training import trl_compat
from lora_grpo.training.alarms import Alarms
from lora_grpo.training.completions import Validation
from lora_grpo.training.logprob_check import check_logprobs, tolerance
from lora_grpo.training.monitor import Monitor
from lora_grpo.training.sft import build_sft_trainer
from lora_grpo.training.time_budget import TimeBudget
from lora_grpo.training.trackers import Trackers
from lora_grpo.training.trl_config import grpo_arguments, naming_overrides


def make_trainer(
    run: Run,
    policy: Policy,
    rows: Sequence[Row],
    sampler: Sampler,
    validation_rows: Sequence[Row] = (),
    budget: TimeBudget | None = None,
) -> Any:
    """Build the trainer without training or writing anything, so that TRL rejects bad settings before a run begins.

    In GRPO, the sampler generates the rollouts, unless Unsloth's trainer generates them itself. SFT has no rollouts,
    and its validation reward is the task's own score.

    Raises:
        UserError: a reward cannot be loaded, a column mixes types, or TRL rejects a setting.
        RunError: the sampler does not sample from the policy being trained.
    """
    from transformers import PrinterCallback, TrainerCallback

    config, is_sft = run.config, run.config.method == "sft"
    if not is_sft and not sampler.serves_training and any(row["prompt"][-1]["role"] == "assistant" for row in rows):
        raise UserError(
            "prompts end with an assistant message, which Unsloth's trainer closes in place of continuing it; pass "
            "--model.engine peft"
        )
    rewards = resolve(parse_reward_specs(("correct_answer=1.0",) if is_sft else config.rewards))
    scorer = Scorer(rewards, policy.tokenizer, [*rows, *validation_rows])
    if policy.engine == "peft":
        trl_compat.ignore_installed_vllm()
    with naming_overrides(config, UserError):
        try:
            if is_sft:
                trainer = build_sft_trainer(run, policy, rows, sampler)
            else:
                trainer = _build_grpo_trainer(run, policy, rows, sampler, scorer)
            trainer.create_optimizer()
        except (ValueError, TypeError, ImportError, NotImplementedError) as error:
            raise UserError(f"TRL rejects the configuration: {' '.join(str(error).split())}") from error
    trainer.optimizer = None  # created only to raise errors early; the adapter's dtype changes before training
    trainer.keep_checkpoints = config.train.keep_checkpoints
    if not is_sft and isinstance(sampler, VllmSampler):
        trl_compat.enable_importance_sampling(trainer)
    trainer.progress = Progress(config.step_limit, config.method.upper())
    if not run.is_trained:
        prompts = [chat.render_row(policy.tokenizer, row) for row in rows]
        with naming_overrides(config, RunError):
            found = check_logprobs(trainer, sampler, prompts)
        run.record["logprob_check"] = found or {"skipped": "the trained model generates"}
        run.record["padded_rows"] = getattr(trainer, "why_padded", "")
    validation = Validation(run, validation_rows, scorer, sampler) if validation_rows else None
    callback = types.new_class("MonitorCallback", (Monitor, TrainerCallback))
    alarms = _alarms(run, policy, rewards, trainer)
    trainer.monitor = callback(run, trainer, alarms, validation, budget or TimeBudget(run))
    trainer.add_callback(trainer.monitor)
    trainer.trackers = types.new_class("TrackersCallback", (Trackers, TrainerCallback))(run, trainer)
    trainer.add_callback(trainer.trackers)  # after the monitor, which adds to the logs
    trainer.remove_callback(PrinterCallback)  # it prints every log as a dictionary
    return trainer


def _build_grpo_trainer(run: Run, policy: Policy, rows: Sequence[Row], sampler: Sampler, scorer: Scorer) -> Any:
    from trl import GRPOConfig

    from lora_grpo.training.fast_trainer import RecipeTrainer  # after `load_policy` has imported Unsloth

    config = run.config
    arguments = grpo_arguments(config, run.checkpoints, [reward.weight for reward in scorer.rewards])
    arguments["use_vllm"] = isinstance(sampler, SharedVllmSampler)
    # Unsloth's trainer renders the prompts itself.
    arguments["chat_template_kwargs"] = template_variables.variables(policy.tokenizer.chat_template)
    unread = sorted(UNREAD_FIELDS & parse_grpo_overrides(config.grpo).keys()) if sampler.serves_training else []
    if unread:
        raise UserError(f"--grpo {unread[0]} has no effect: the built-in sampler does not read it; leave it out")
    order = prompt_order(len(rows), config.train.max_steps * config.train.prompts_per_step, config.seed)
    return RecipeTrainer(
        run,
        policy,
        sampler,
        scorer,
        args=GRPOConfig(**arguments),
        train_dataset=training_set(policy.tokenizer, rows, order),
        reward_funcs=[reward.function for reward in scorer.rewards],  # their names; `ScoredRollouts` calls them
    )


def _alarms(run: Run, policy: Policy, rewards: Sequence[Reward], trainer: Any) -> Alarms:
    import torch

    max_reward = sum(max(0.0, reward.weight) for reward in rewards)
    dropout = run.config.lora.dropout  # the base has none, see `load_policy`
    # The trainer applies dropout, and TRL's logprobs ignore top_p. Neither is a mismatch between sampler and trainer.
    comparable = run.config.sampling.top_p == 1 and not dropout
    uses_float16 = base_model.compute_dtype() == torch.float16
    # Dropout differs between the two passes, and a narrow range clips rounding errors.
    checks_ratio = policy.engine == "unsloth" and not dropout and getattr(trainer.args, "epsilon", 0.0) >= 0.2
    return Alarms(max_reward, tolerance() if comparable else None, sft_command(run.config), uses_float16, checks_ratio)
