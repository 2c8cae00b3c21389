"""Checks a configuration: consistency of fields, installed packages, and processes."""

import importlib.util

from lora_grpo.commands import command, install_command
from lora_grpo.config import RunConfig, TeacherConfig, batch_shape, field_of_micro_batches, parse_grpo_overrides
from lora_grpo.data import check_tasks, columns_of
from lora_grpo.errors import UserError
from lora_grpo.flags import flag
from lora_grpo.hardware import choose_engine, flags_of_vllm, settings_of_vllm
from lora_grpo.prompts import template_variables
from lora_grpo.rewards import TEST_REWARDS, parse_reward_specs
from lora_grpo.tasks import CODE_TASKS, get_task, task_title


def check(config: RunConfig) -> None:
    """Raise UserError for a configuration that cannot run, before heavy packages are imported."""
    batch_shape(config)
    _check_tasks(config)
    _check_sampling(config)
    _check_training(config)
    _check_teacher(config)


def check_has_vllm(config: RunConfig) -> None:
    """Raise UserError for settings of vLLM without a vLLM engine in this run: beside another backend, or a server.

    Not for a run that is resumed: there, the backend may be what became of `auto`. What `auto` means is not known yet;
    `draft_plan` refuses these settings if it is the built-in sampler.
    """
    if config.sampling.backend == "transformers":
        for name in settings_of_vllm(config):
            raise UserError(f"{name} needs vLLM; leave it or --sampling.backend transformers out")
    if config.sampling.server_url:
        for name in flags_of_vllm(config):
            raise UserError(
                f"{name} has no effect on the vLLM server of --sampling.server-url, which has its own settings; leave "
                "it out"
            )


def _check_tasks(config: RunConfig) -> None:
    task = config.data.task
    definition = get_task(task)
    if task in ("humaneval", "humaneval-plus"):
        raise UserError(f"--data.task {task} has no training split; pass mbpp, and {task} as --data.eval-task")
    if config.method == "sft" and not getattr(definition, "has_gold", True):
        raise UserError(
            f"{task} has no reference answers, and SFT needs them; add gold(row) to a task of your own, or train with "
            f"GRPO: {command('train task', '--task', task)}"
        )
    evaluated_titles: set[str] = set()
    for name in (config.data.evaluation_task, *config.eval.also):
        get_task(name)
        if task_title(name) in evaluated_titles:
            raise UserError(f"--eval.also: {name} is evaluated already, as the task of the run or twice; leave it out")
        evaluated_titles.add(task_title(name))
    check_tasks(config)
    columns_of(config.data, "train")
    template_variables.parse_kwargs(config.model.chat_template_kwargs)
    for spec in parse_reward_specs(config.rewards):
        if spec.name in TEST_REWARDS and task not in CODE_TASKS:
            raise UserError(f"--rewards {spec.name} needs unit tests, as in {', '.join(CODE_TASKS)}, not {task}")


def _check_sampling(config: RunConfig) -> None:
    sampling = config.sampling
    url = sampling.server_url
    if config.lora.dora and (sampling.backend == "vllm" or url):
        raise UserError("--lora.dora is not supported by vLLM; pass --sampling.backend transformers")
    if url and sampling.backend == "transformers":
        raise UserError("--sampling.server-url needs vLLM; leave --sampling.backend transformers out")
    if sampling.server_folder and not url:
        raise UserError("--sampling.server-folder needs --sampling.server-url")
    if url and config.model.engine == "unsloth":
        raise UserError("--sampling.server-url needs --model.engine peft; Unsloth uses its own sampler")
    if sampling.max_completion_tokens >= config.model.max_sequence_tokens:
        raise UserError(
            f"--sampling.max-completion-tokens {sampling.max_completion_tokens} leaves no room for a prompt in "
            f"--model.max-sequence-tokens {config.model.max_sequence_tokens}; raise the second"
        )
    largest = max(config.eval.k, default=0)
    if config.eval.num_samples and largest > config.eval.num_samples:
        raise UserError(f"--eval.k {largest} needs --eval.num-samples {largest} or more, got {config.eval.num_samples}")


def _check_training(config: RunConfig) -> None:
    for tracker in config.train.report_to:
        if importlib.util.find_spec(tracker) is None:
            raise UserError(f"--train.report-to {tracker} needs that package; run `{install_command(tracker)}`")
    overrides = parse_grpo_overrides(config.grpo)
    if overrides.get("off_policy_mask_threshold") is not None and config.sampling.top_p < 1:
        raise UserError(
            f"--grpo off_policy_mask_threshold needs --sampling.top-p 1, got {config.sampling.top_p:g}: it compares "
            "logprobs of the sampler, which leaves out tokens outside of top_p, with the trainer's, which include "
            "them; leave one of the two out"
        )
    iterations = overrides.get("num_iterations", 1)
    if not isinstance(iterations, int) or iterations < 1:
        raise UserError(f"--grpo num_iterations={iterations}; expected 1 or more")
    for name in ("max_steps", "checkpoint_steps"):
        steps = getattr(config.train, name)
        if iterations > 1 and steps % iterations:
            raise UserError(
                f"{flag(f'train.{name}')} {steps} is not a multiple of num_iterations={iterations}; rollouts are used "
                f"{iterations} times, and neither a run nor a checkpoint can end in between"
            )
    if config.step_limit is None:  # only the time limits the number of steps
        flags_that_need_steps = []
        if config.train.schedule_spans_run:
            flags_that_need_steps.append("--train.lr-scheduler")
        if config.data.filter_by_difficulty:
            flags_that_need_steps.append("--data.filter-by-difficulty")
        if flags_that_need_steps:
            raise UserError(
                f"{flags_that_need_steps[0]} depends on the number of steps, and --hours alone does not set it; pass "
                "--train.max-steps too, or leave it out"
            )
    if config.lora.from_ and config.train.beta and choose_engine(config) == "unsloth":
        raise UserError(
            "--train.beta with --lora.from needs --model.engine peft: Unsloth computes the KL penalty against the "
            "base, not against the adapter"
        )
    if config.processes > 1 and config.model.engine == "unsloth":
        raise UserError(
            f"--model.engine unsloth trains in one process, got WORLD_SIZE={config.processes}; "
            "pass --model.engine peft, or start one process"
        )

    field = field_of_micro_batches(config.grpo)
    if field and config.train.micro_batch_size is None:
        raise UserError(
            f"--grpo {field} takes means or quantiles within a micro-batch, so that the loss depends on its size; pass "
            f"--train.micro-batch-size, e.g. {batch_shape(config).micro_batch_size}"
        )


def _check_teacher(config: RunConfig) -> None:
    if config.teacher.name is None:
        for name, default in vars(TeacherConfig()).items():
            if getattr(config.teacher, name) != default:
                raise UserError(
                    f"{flag(f'teacher.{name}')} has no effect without a teacher; pass --teacher, or leave it out"
                )
        return
    if config.model.engine == "unsloth":
        raise UserError("--teacher needs --model.engine peft: Unsloth's loss has one advantage for all tokens")
    overrides = parse_grpo_overrides(config.grpo)
    if overrides.get("loss_type") == "vespo":
        raise UserError("--grpo loss_type=vespo weights whole completions, and a teacher scores tokens; leave it out")
    level = overrides.get("importance_sampling_level", "token")
    if level != "token" and config.teacher.loss == "sampled":
        raise UserError(
            f"--grpo importance_sampling_level={level} gives all tokens of a completion their mean advantage, and a "
            "teacher scores tokens; leave it out, or pass --teacher.loss reverse_kl"
        )
    if overrides.get("off_policy_mask_threshold") is not None:
        raise UserError(
            "--grpo off_policy_mask_threshold masks completions by their advantage, and with --teacher each token has "
            "its own; leave it out"
        )
