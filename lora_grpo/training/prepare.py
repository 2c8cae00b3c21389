"""Build the trainer of a run, and the parts that watch it, from its configuration, policy, rows and rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo.config import UNREAD_FIELDS, parse_grpo_overrides
from lora_grpo.data import prompt_order, sft_command
from lora_grpo.errors import RunError, UserError
from lora_grpo.grading import Row
from lora_grpo.memory import GIB
from lora_grpo.models import Policy, TeacherModel, base_model, find_teacher, load_teacher
from lora_grpo.monitoring import Alarms, Monitor, TimeBudget, Trackers, Validation, peaks_of_run
from lora_grpo.progress import Progress
from lora_grpo.prompts import chat, template_variables
from lora_grpo.rewards import Reward, Scorer, parse_reward_specs, resolve, training_set
from lora_grpo.runs import Run
from lora_grpo.sampling import Sampler, SharedVllmSampler
from lora_grpo.training import trl_compat
from lora_grpo.training.logprob_check import check_logprobs, tolerance
from lora_grpo.training.sft import build_sft_trainer
from lora_grpo.training.stop_signal import StopOnSignal
from lora_grpo.training.trl_config import grpo_arguments, naming_overrides


@dataclass(frozen=True)
class Training:
    """A run that is ready to train."""

    run: Run
    policy: Policy
    trainer: Any
    """TRL's GRPOTrainer (`RecipeTrainer`) or SFTTrainer (`RecipeSFTTrainer`), which calls the parts below."""
    monitor: Monitor
    """Metrics, alarms, validation and the best adapter."""
    trackers: Trackers
    progress: Progress
    stop: StopOnSignal


def prepare_training(
    run: Run,
    policy: Policy,
    rows: Sequence[Row],
    sampler: Sampler,
    validation_rows: Sequence[Row] = (),
    budget: TimeBudget | None = None,
) -> Training:
    """Build the trainer without training or writing anything, so that TRL rejects bad settings before a run begins.

    In GRPO, the sampler generates the rollouts, unless Unsloth's trainer generates them itself. SFT has no rollouts,
    and its validation reward is the task's own score.

    Raises:
        UserError: a reward cannot be loaded, a column mixes types, or TRL rejects a setting.
        RunError: the sampler does not sample from the policy being trained.
    """
    config = run.config
    is_sft = config.method == "sft"
    peaks = peaks_of_run(run.record)
    start_peak = peaks.end_start()  # the base and the engines are loaded
    if start_peak is not None:
        run.record["peak_start_gib"] = round(start_peak / GIB, 2)

    # The rewards.
    if not is_sft and not sampler.serves_training:
        _check_unsloth_prompts(rows)
    reward_specs = config.rewards
    if is_sft:
        reward_specs = ("correct_answer=1.0",)
    rewards = resolve(parse_reward_specs(reward_specs))
    scorer = Scorer(rewards, policy.tokenizer, [*rows, *validation_rows])

    # The trainer.
    teacher = _load_teacher(run, policy)
    trainer = _build_trainer(run, policy, rows, sampler, scorer, teacher)
    trainer.step_metrics.peaks = peaks
    if not run.is_trained:
        _check_sampler(run, policy, trainer, sampler, rows)

    # What watches it.
    validation = None
    if validation_rows:
        validation = Validation(run, validation_rows, scorer, sampler)
    progress = Progress(config.step_limit, config.method.upper())
    stop = StopOnSignal()
    monitor = Monitor(
        run,
        policy,
        trainer.step_metrics,
        _alarms(run, policy, rewards, trainer),
        validation,
        budget or TimeBudget(run),
        progress,
        is_stopped=lambda: stop.signal_number() > 0,
        steps_per_rollout=1 if is_sft else trainer.num_iterations,
    )
    trackers = Trackers(run, trainer)
    _add_callbacks(trainer, monitor, trackers)
    return Training(run, policy, trainer, monitor, trackers, progress, stop)


def _check_unsloth_prompts(rows: Sequence[Row]) -> None:
    """Raise a UserError if prompts end with words of the model, which Unsloth's trainer does not continue."""
    if any(row["prompt"][-1]["role"] == "assistant" for row in rows):
        raise UserError(
            "prompts end with an assistant message, which Unsloth's trainer closes in place of continuing it; pass "
            "--model.engine peft"
        )


def _load_teacher(run: Run, policy: Policy) -> TeacherModel | None:
    """Load the teacher of a run, and record what it is; None without a teacher.

    After the sampler, whose copy of the model has the layers with a trained adapter only.
    """
    teacher = find_teacher(run.config, resumed=run.is_resumed)
    if teacher is None:
        return None
    loaded = load_teacher(teacher, policy)
    policy.record["teacher_sha256"] = teacher.sha256
    policy.record["teacher_revision"] = loaded.teacher.base.revision if loaded.teacher.base else None
    run.record["teacher"] = loaded.teacher.record()
    return loaded


def _build_trainer(
    run: Run, policy: Policy, rows: Sequence[Row], sampler: Sampler, scorer: Scorer, teacher: TeacherModel | None
) -> Any:
    if policy.engine == "peft":
        trl_compat.ignore_installed_vllm()
    with naming_overrides(run.config, UserError):
        try:
            if run.config.method == "sft":
                trainer = build_sft_trainer(run, policy, rows, sampler)
            else:
                trainer = _build_grpo_trainer(run, policy, rows, sampler, scorer, teacher)
            trainer.create_optimizer()
        except (ValueError, TypeError, ImportError, NotImplementedError) as error:
            raise UserError(f"TRL rejects the configuration: {' '.join(str(error).split())}") from error
    trainer.optimizer = None  # built only so that a bad optimizer fails now; `train` builds its own
    return trainer


def _build_grpo_trainer(
    run: Run, policy: Policy, rows: Sequence[Row], sampler: Sampler, scorer: Scorer, teacher: TeacherModel | None
) -> Any:
    from trl import GRPOConfig

    from lora_grpo.training.fast_trainer import RecipeTrainer  # after `load_policy` has imported Unsloth

    config = run.config
    if sampler.serves_training:
        unread_fields = sorted(UNREAD_FIELDS & parse_grpo_overrides(config.grpo).keys())
        if unread_fields:
            raise UserError(
                f"--grpo {unread_fields[0]} has no effect: the built-in sampler does not read it; leave it out"
            )
    arguments = grpo_arguments(config, run.checkpoints, [reward.weight for reward in scorer.rewards])
    arguments["use_vllm"] = isinstance(sampler, SharedVllmSampler)
    if arguments["use_vllm"]:
        arguments["generation_kwargs"] = trl_compat.without_text(arguments.get("generation_kwargs") or {})
    # Unsloth's trainer renders the prompts itself.
    arguments["chat_template_kwargs"] = template_variables.variables(policy.tokenizer.chat_template)
    num_prompts = config.train.max_steps * config.train.prompts_per_step
    order = prompt_order(len(rows), num_prompts, config.seed)
    return RecipeTrainer(
        run,
        policy,
        sampler,
        scorer,
        teacher,
        args=GRPOConfig(**arguments),
        train_dataset=training_set(policy.tokenizer, rows, order),
        reward_funcs=[reward.function for reward in scorer.rewards],  # TRL logs their names; the scorer calls them
    )


def _check_sampler(run: Run, policy: Policy, trainer: Any, sampler: Sampler, rows: Sequence[Row]) -> None:
    """Compare logprobs of sampler and trainer. Record the differences, and why the loss reads padded rows if it
    does."""
    prompts = [chat.render_row(policy.tokenizer, row) for row in rows]
    with naming_overrides(run.config, RunError):
        differences = check_logprobs(trainer, sampler, prompts)
    run.record["logprob_check"] = differences or {"skipped": "the trained model generates"}
    run.record["padded_rows"] = getattr(trainer, "packing_disabled_reason", "")  # SFT has no loss pass


def _alarms(run: Run, policy: Policy, rewards: Sequence[Reward], trainer: Any) -> Alarms:
    import torch

    config = run.config
    has_dropout = config.lora.dropout > 0  # the base has none, see `load_policy`
    # The trainer applies dropout, and TRL's logprobs ignore top_p. Neither is a mismatch between sampler and trainer.
    is_comparable = config.sampling.top_p == 1 and not has_dropout
    # Only rounding clips tokens before the first update, unless the passes for the old and the new logprobs drop other
    # values. A range narrower than the usual one clips more of the rounding errors.
    has_usual_range = getattr(trainer.args, "epsilon", 0.0) >= 0.2
    checks_ratio = policy.engine == "unsloth" and not has_dropout and has_usual_range
    return Alarms(
        max_reward=sum(max(0.0, reward.weight) for reward in rewards),
        max_mismatch=tolerance() if is_comparable else None,
        sft=sft_command(config),
        has_teacher=config.teacher.name is not None,
        learns_from_rewards=config.teacher.reward_weight > 0,
        validates_as_it_trains=not config.data.filter_by_difficulty,  # the filter leaves validation rows as they are
        float16=base_model.compute_dtype() == torch.float16,
        checks_ratio=checks_ratio,
    )


def _add_callbacks(trainer: Any, monitor: Monitor, trackers: Trackers) -> None:
    from transformers import PrinterCallback

    from lora_grpo.training.callbacks import MonitorCallback, TrackersCallback

    trainer.add_callback(MonitorCallback(monitor, trainer))
    trainer.add_callback(TrackersCallback(trackers))  # after the monitor, which adds to the logs
    trainer.remove_callback(PrinterCallback)  # it prints every log as a dictionary
