"""GRPO: TRL's trainer put together from a configuration, a policy, rows and rewards."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

from lora_grpo import distributed
from lora_grpo.config import UNREAD_FIELDS, RunConfig, parse_grpo_overrides
from lora_grpo.errors import Interrupted, RunError, UserError
from lora_grpo.files import atomic
from lora_grpo.models import Policy, base_model, load_adapter, save_adapter
from lora_grpo.progress import Progress
from lora_grpo.rewards import parse_reward_specs, resolve, training_set, trl_rows
from lora_grpo.runs import AtomicCheckpoints, Run, newest_complete
from lora_grpo.sampling import Sampler, SamplingParams, SharedVllmSampler, completion_seed
from lora_grpo.tasks import Row, chat, prompt_order
from lora_grpo.training import monitor
from lora_grpo.training.alarms import Alarms
from lora_grpo.training.chunked_logprobs import ChunkedLogProbs
from lora_grpo.training.completion_log import CompletionLog
from lora_grpo.training.logprob_check import check_logprobs, tolerance
from lora_grpo.training.logprob_mismatch import LogprobMismatchMeter, correct, drops_out
from lora_grpo.training.memory_probe import probe
from lora_grpo.training.monitor import Monitor
from lora_grpo.training.step_phases import StepPhases, add_training_time
from lora_grpo.training.stop_signal import StopOnSignal
from lora_grpo.training.trl_config import grpo_arguments
from lora_grpo.training.validation import Validation


def train(run: Run, policy: Policy, trainer: Any) -> None:
    """Train the policy's adapter with GRPO and leave it in the run's `adapter/`.

    A finished run returns at once with the adapter loaded; one that was killed goes on from its newest complete
    checkpoint.

    Args:
        run: the open run; metrics, checkpoints and completions are written into its folder.
        policy: model, tokenizer and adapter; trained in place.
        trainer: what `make_trainer` returned.

    Raises:
        Interrupted: SIGTERM or Ctrl-C came; a checkpoint was saved first.
        RewardError: a reward function failed.
        RunError: the GPU's memory did not suffice, or no row could be graded.
        UserError: a checkpoint has more steps than the run is asked for.
    """
    config = run.config
    if _is_trained(run):
        load_adapter(policy.model, run.adapter)
        if step := _stopped_early(run):
            print(f"stopped early after step {step}; --monitor.early-stopping 0 goes on", file=sys.stderr)
        return
    policy.model.enable_adapter_layers()  # an evaluation of the base may have switched them off
    found = distributed.broadcast_from_main(lambda: newest_complete(run.checkpoints))
    done = found[1] if found else 0
    if done > config.train.max_steps:
        raise UserError(
            f"the run in {run.folder} is at step {done} already; pass --train.max-steps {done} or more, or another "
            "--output-dir"
        )
    monitor.forget_after(run, done)
    if distributed.is_main():
        _forget_after(run, done)
    distributed.barrier()
    run.update(logprob_check=trainer.logprob_check)
    if found:
        print(f"resuming from {found[0]}", file=sys.stderr)
        trainer.completion_log.resumed_at(done)
    if found and (done >= config.train.max_steps or _stopped_early(run) == done):
        # Killed between the last checkpoint and the adapter.
        load_adapter(policy.model, found[0])
    else:
        _train(run, trainer, str(found[0]) if found else None)
    steps = _stopped_early(run) or config.train.max_steps
    if _stopped_early(run) and "best" in run.record:
        load_adapter(policy.model, run.best)
        steps = run.record["best"]["step"]
    if distributed.is_main():
        save_adapter(policy.model, policy.tokenizer, run.adapter)
    run.update(trained_steps=steps)


def _is_trained(run: Run) -> bool:
    """Tell whether the run has had all its steps, and the adapter that they made."""
    ended = bool(_stopped_early(run)) or run.record.get("trained_steps") == run.config.train.max_steps
    return distributed.broadcast_from_main(run.adapter.is_dir) and ended


def _stopped_early(run: Run) -> int | None:
    """Return the step after which early stopping ended the training, where no more patience is asked for now."""
    stopped, patience = run.record.get("stopped_early"), run.config.monitor.early_stopping
    return stopped["step"] if stopped and 0 < patience <= stopped["passes"] else None


def _train(run: Run, trainer: Any, checkpoint: str | None) -> None:
    """Run the trainer to its end, or to a signal."""
    import torch

    with StopOnSignal() as stop:
        trainer.add_callback(
            _callback(on_step_end=lambda state, control: stop.obey(state, control, trainer.num_iterations))
        )
        started = time.monotonic()
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"the GPU's memory did not suffice in step {trainer.state.global_step + 1}; go on with --resume "
                f"--train.micro-batch-size {max(1, trainer.args.per_device_train_batch_size // 2)}, or begin anew with "
                f"a smaller --sampling.max-completion-tokens ({_one_line(error)})"
            ) from error
        finally:
            trainer.progress.close()
    steps, stopped_by = trainer.state.global_step, distributed.max_over_processes(stop.caught)
    on_gpu = torch.cuda.is_available()
    run.update(
        seconds_training=round(run.record.get("seconds_training", 0) + time.monotonic() - started, 1),
        peak_memory_gib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2, 2),
        peak_gpu_memory_gib=round(torch.cuda.max_memory_allocated() / 1024**3, 2) if on_gpu else None,
    )
    if stopped_by:
        raise Interrupted(f"stopped after step {steps} of {run.config.train.max_steps}, saved", stopped_by)


def make_trainer(
    run: Run, policy: Policy, rows: Sequence[Row], sampler: Sampler, validation_rows: Sequence[Row] = ()
) -> Any:
    """Put TRL's trainer together. Nothing is trained or written yet: what TRL refuses, it refuses before a run begins.

    Args:
        run: the open run.
        policy: model, tokenizer and adapter.
        rows: training rows with `prompt`; asked in a seeded order.
        sampler: draws the rollouts, where the engine does not do so itself.
        validation_rows: rows that are not trained on, of `validation.split_validation`.

    Raises:
        UserError: a reward cannot be loaded, a column holds values of several types, or TRL refuses a setting.
        RunError: the sampler does not draw from the policy that is trained.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental, and pinned with TRL
    # transformers has no argument for it; without it the events would land among the checkpoints.
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.folder / "tensorboard")
    import torch
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    config = run.config
    rewards = resolve(parse_reward_specs(config.rewards))
    weights = {reward.name: reward.weight for reward in rewards}
    log = CompletionLog(run.completions, config.train.completions_steps, weights, sampler.eos_token_ids)
    arguments = grpo_arguments(config, run.checkpoints, [*weights.values()])
    arguments["use_vllm"] = isinstance(sampler, SharedVllmSampler)
    unread = sorted(UNREAD_FIELDS & parse_grpo_overrides(config.grpo).keys()) if sampler.serves_training else []
    if unread:
        raise UserError(f"--grpo {unread[0]} would be ignored: the kit's own sampler does not read it; leave it out")
    try:
        settings = GRPOConfig(**arguments)
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"TRL refuses the configuration: {_one_line(error)}") from error

    order = prompt_order(len(rows), config.train.max_steps * config.train.prompts_per_step, config.seed)
    trainer_class = types.new_class(
        "Trainer", (AtomicCheckpoints, StepPhases, LogprobMismatchMeter, ChunkedLogProbs, GRPOTrainer)
    )
    try:
        trainer = trainer_class(
            model=policy.model,
            processing_class=policy.tokenizer,
            args=settings,
            train_dataset=training_set(policy.tokenizer, rows, order),
            reward_funcs=[log.wrap(reward.function) for reward in rewards],
            rollout_func=_rollout_function(config, policy, sampler) if sampler.serves_training else None,
        )
        trainer.create_optimizer()
        trainer.optimizer = None  # it was made to see that it can be; the weights are cast first
    except (ValueError, ImportError, NotImplementedError) as error:
        raise UserError(f"TRL refuses the configuration: {_one_line(error)}") from error
    trainer.keep_checkpoints = config.train.keep_checkpoints
    # TRL 1.14 rounds a quantised model's adapter to bfloat16, whose steps are larger than most GRPO updates, while a
    # resumed run would get it back in float32. Full precision here costs a few megabytes and makes both runs one.
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    # TRL adds a frozen copy of the adapter as the KL reference. A fresh adapter is zero: the base serves as well.
    if "ref" in policy.model.peft_config:
        policy.model.delete_adapter("ref")
        policy.model.set_adapter("default")
    # Dropout is drawn anew in the trainer, and TRL's log-probabilities know nothing of a nucleus.
    comparable = config.sampling.top_p == 1 and not drops_out(policy.model)
    asked = trl_rows(policy.tokenizer, [*rows, *validation_rows])[len(rows) :]  # with the columns of all rows
    max_reward = sum(max(0.0, weight) for weight in weights.values())
    trainer.completion_log, trainer.progress = log, Progress(config.train.max_steps)
    trainer.on_phase = trainer.progress.phase
    trainer.monitor = Monitor(
        run,
        Alarms(
            max_reward,
            tolerance(base_model.compute_dtype()) if comparable else None,
            base_model.compute_dtype() == torch.float16,
        ),
        Validation(run.validation, config, validation_rows, asked, rewards, sampler) if validation_rows else None,
    )
    if sampler.is_other_engine:
        correct(trainer)
    prompts = [chat.render_row(policy.tokenizer, row) for row in rows]
    longest_prompt = max(map(len, sampler.encode(prompts)))
    temperature = config.sampling.temperature if sampler.serves_training else 1.0
    if not _is_trained(run):
        longest = config.sampling.max_completion_tokens
        logprob_check = check_logprobs(trainer, sampler, prompts, base_model.compute_dtype(), temperature, longest)
        trainer.logprob_check = logprob_check.record() if logprob_check else "not needed: the trained model generates"

    def on_log(state: Any, logs: dict[str, Any]) -> None:
        if "loss" not in logs:
            return
        if "reward" in logs and logs["reward"] is None:
            raise RunError(f"no row could be graded in step {state.global_step}: every reward returned None")
        add_training_time(logs)
        if distributed.is_main():
            with run.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        trainer.progress.step(state.global_step, logs)
        trainer.monitor.after_log(state.global_step, logs)

    def on_train_begin() -> None:
        run.update(memory_probe=probe(trainer, config, longest_prompt))
        trainer.monitor.begin(trainer)

    def on_step_end(state: Any, control: Any) -> None:
        log.write(state.global_step)
        trainer.monitor.after_step(trainer, control)

    trainer.add_callback(
        _callback(
            on_train_begin=on_train_begin,
            on_log=on_log,
            on_step_end=on_step_end,
            on_save=lambda: trainer.monitor.save_best(trainer),
        )
    )
    # Its only use is to print every log as a dictionary.
    trainer.remove_callback(PrinterCallback)
    return trainer


def _rollout_function(config: RunConfig, policy: Policy, sampler: Sampler) -> Callable[..., dict[str, Any]]:
    """Return TRL's `rollout_func`: one call samples all completions of a step from the current policy."""
    settings = config.sampling

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rendered = [prompt if isinstance(prompt, str) else chat.render(policy.tokenizer, prompt) for prompt in prompts]
        group = config.sampling.num_generations
        heads = rendered[::group]
        if [head for head in heads for _ in range(group)] != rendered:  # a process that holds parts of groups
            heads, group = rendered, 1
        # Numbered across all processes, so that two of them sample what one would.
        first, step = trainer.accelerator.process_index * len(rendered), f"step {trainer.state.global_step}"
        seeds = [completion_seed(config.seed, step, first + index) for index in range(len(rendered))]
        params = SamplingParams(group, settings.temperature, settings.top_p, settings.max_completion_tokens)
        completions = [*itertools.chain(*sampler.sample(heads, params, seeds))]
        return {
            "prompt_ids": [ids for ids in sampler.encode(heads) for _ in range(group)],
            "completion_ids": [each.token_ids for each in completions],
            "logprobs": [each.logprobs for each in completions],
        }

    return rollout


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _forget_after(run: Run, step: int) -> None:
    """Drop what came after the checkpoint that the run goes on from; those steps and the adapter come again."""
    shutil.rmtree(run.adapter, ignore_errors=True)
    for samples in run.evaluation.glob("trained.samples.jsonl*"):
        samples.unlink()
    run.checkpoints.mkdir(exist_ok=True)
    run.completions.mkdir(exist_ok=True)
    for leftover in (*run.checkpoints.glob(".*"), *run.completions.glob(".*")):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    if run.metrics.exists():
        kept = []
        for line in run.metrics.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except ValueError:  # the line that was being written when the process was killed
                break
        atomic.write_text(run.metrics, "".join(line + "\n" for line in kept))
    for path in run.completions.glob("step-*.jsonl"):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()


def _callback(
    on_log: Callable[[Any, dict[str, Any]], None] | None = None,
    on_step_end: Callable[[Any, Any], None] | None = None,
    on_train_begin: Callable[[], None] | None = None,
    on_save: Callable[[], None] | None = None,
) -> Any:
    """Make a TrainerCallback of functions of (state, logs), of (state, control) and, twice, of nothing."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if on_train_begin:
                on_train_begin()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if on_log and logs:
                on_log(state, logs)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if on_step_end:
                on_step_end(state, control)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if on_save:
                on_save()

    return Callback()
