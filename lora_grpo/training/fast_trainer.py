"""TRL's GRPOTrainer with the sampler and loss pass of this package: the one for scripts, and the one of the recipes.

FastGRPOTrainer overrides the methods of TRL that a step calls, in the order of the calls. Each override calls a part:
`step_sampling.py` samples, `rewards/` grades, `loss/` computes logprobs, `monitoring/` collects metrics. What leans on
TRL's private attributes is in `trl_compat.py`. Checkpoints override transformers' methods in `runs/checkpoints.py`.

This module imports TRL, so `lora_grpo.training` imports it only when FastGRPOTrainer is used.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from trl import GRPOTrainer

from lora_grpo import console, distributed
from lora_grpo.errors import UserError, one_line
from lora_grpo.loss import (
    TEACHER_LOGPROBS,
    ExactLossPass,
    PackedAttention,
    SamplerComparison,
    TeacherComparison,
    padding_obstacle,
)
from lora_grpo.models import Policy, TeacherModel, base_of
from lora_grpo.monitoring import (
    IMPORTANCE_WEIGHT,
    LARGEST_LOGPROB_MISMATCH,
    LOGPROB_MISMATCH,
    TEACHER_DISAGREEMENT,
    TEACHER_KL,
    StepMetrics,
    clock,
    completion_lines,
    conversation_metrics,
    write_completions,
)
from lora_grpo.rewards import ScoredBatch, Scorer
from lora_grpo.rollouts import Episode, play_all
from lora_grpo.runs import AtomicCheckpoints, Run
from lora_grpo.sampling import Sampler, VllmSampler
from lora_grpo.training import trl_compat, unsloth_compat
from lora_grpo.training.fallback import sampling_fallback_reason, unsupported_reason
from lora_grpo.training.step_sampling import StepSampling, print_fallback
from lora_grpo.training.teacher_pass import TeacherPass, TeacherScores


class FastGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer that takes the same arguments, computes the same loss, and takes less time.

    - The sampler of this package generates completions. Before the first step, its logprobs are compared with the
      trainer's (`check_logprobs`). Seeds differ from TRL's, so completions do too.
    - The loss pass reads each prompt once for its group, skips completions with advantage zero, and computes logits in
      tiles. The loss and its gradient are TRL's except for rounding.
    - The adapter is trained in float32. TRL casts the adapter of a quantized model to bfloat16.
    - Logs also contain the metrics of `StepMetrics`.

    If something cannot be faster (`use_vllm`, `tools`, `rollout_func`, images, an attention that cannot share prompts),
    TRL's code does it, and one line on stderr gives the reason. The same happens if this package's code fails before it
    has worked once, or if its sampler does not sample from the model being trained. docs/python.md lists all cases.

    Micro-batches are slices in the order of the prompts, not of a random permutation. In total, the gradient of a step
    is the same, with three exceptions:

    - `steps_per_generation` is greater than `gradient_accumulation_steps`: a step trains on part of the completions,
      which is another part than TRL's.
    - A step has several micro-batches, and `loss_type="bnpo"`, `entropy_coef` or `top_entropy_quantile`, which take
      means or quantiles within one.
    - With LoRA dropout, a group shares one dropout mask for its prompt. TRL draws one for each completion.

    In `evaluate`, equal prompts in different batches get equal completions.
    """

    fallback_reason: str
    """The reason why TRL's own code samples and computes the loss, or "" if this package's does."""
    fallback_errors: tuple[type[Exception], ...] = (Exception,)
    """Types of exceptions after which TRL's code takes over, as long as this package's has never succeeded. Later ones
    are raised. With (), all are."""
    longest_row: float = math.inf
    """Maximum number of tokens of a prompt and its completion, if it is known."""
    packed_attention: PackedAttention = "sdpa"
    """How packed tokens attend in the loss pass: with `flex`, by FlexAttention, which was not measured on a GPU."""
    compiled_layers: bool = False
    """Whether the loss pass compiles norms and MLPs of the layers by torch.compile, which was not measured on a GPU."""
    weights_in_loss: bool
    """Whether importance weights are computed in the loss. TRL computes them before, with logprobs of another pass."""
    teacher: TeacherPass | None = None
    """Scores the completions of each micro-batch for distillation; None without a teacher."""
    step_inputs: Sequence[Mapping[str, Any]] = ()
    """The rows of the completions that are sampled, one for each completion of this process."""
    _new_rollouts: dict[str, Any] | None = None
    _predecessors: Any = None
    """The columns before the tokens of the completions that TRL is about to score; None if none is a tree."""

    @functools.wraps(GRPOTrainer.__init__)  # type: ignore[misc]  # for `inspect.signature`
    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        trl_compat.fit_fused_head_to_cpu()
        trained_adapter = trl_compat.trained_adapter(model)
        super().__init__(model, *args, **kwargs)
        # TRL keeps the adapter of a sharded model in the dtype of its base.
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            trl_compat.use_float32_adapter(self.model, trained_adapter)

        self.step_metrics = StepMetrics(trl_compat.step_values(self))
        self.sampler_comparison = SamplerComparison()
        self.teacher_comparison = TeacherComparison()
        self._teacher_seconds = 0.0  # in this step
        self.step_sampling = StepSampling(self)
        self.fallback_reason = self.find_fallback_reason()
        self.loss_pass = self.build_loss_pass(self.model)
        self.weights_in_loss = not self.fallback_reason

    @property
    def sampler(self) -> Sampler | None:
        """Sampler of the completions: built with the first ones; None if TRL's code samples."""
        return self.step_sampling.sampler

    @property
    def sampler_failure(self) -> str:
        """The reason why TRL's code samples although the loss is computed by this package, or ""."""
        return self.step_sampling.failure

    @property
    def packing_disabled_reason(self) -> str:
        """The reason why the loss reads each prompt once per completion, or "" if once per group."""
        return self.loss_pass.packing_disabled_reason

    def find_fallback_reason(self) -> str:
        """Return why TRL's own code must sample and compute the loss, or "". Print the reason.

        The test of the model leaves it in eval mode; `Trainer.train` switches to training mode.
        """
        try:
            reason = unsupported_reason(self) or sampling_fallback_reason(self)
            if not reason:
                reason = self.padding_reason(self.model)
        except self.fallback_errors as error:
            reason = f"the model cannot be examined ({one_line(error)})"
        if reason:
            print_fallback("sampling and computing the loss", reason)
        return reason

    def padding_reason(self, model: Any) -> str:
        """Return why padded rows have other logprobs than the same rows without padding, or ""."""
        score = trl_compat.whole_logits_score(self, super()._get_per_token_logps_and_entropies)
        with self.accelerator.autocast():
            return padding_obstacle(model, score, self.processing_class)

    def build_loss_pass(self, model: Any) -> ExactLossPass:
        """Return the pass that reads rows with the trained model, or with a second one: a teacher."""
        score = super()._get_per_token_logps_and_entropies
        if self.fallback_reason:
            return ExactLossPass(model, score, self.processing_class, fallback_reason=self.fallback_reason)
        return ExactLossPass(
            model,
            trl_compat.whole_logits_score(self, score),
            self.processing_class,
            tiles=trl_compat.tiles_of(self, score, model),
            autocast=self.accelerator.autocast,
            longest_row=self.longest_row,
            packed_attention=self.packed_attention,
            compiled_layers=self.compiled_layers,
            has_router_loss=self.aux_loss_enabled,
            has_entropy_bonus=trl_compat.has_entropy_bonus(self),
            fallback_errors=self.fallback_errors,
        )

    # Overrides of TRL. Arguments have TRL's names, because subclasses of the trainer may pass them by name.

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Keep the completions of a prompt in one micro-batch, in which it is read once.

        If new rollouts are due, TRL's method calls `_generate_and_score_completions`, and then shuffles its result.
        This override undoes the shuffle.
        """
        inputs = super()._prepare_inputs(generation_batch)
        rollouts = self._new_rollouts
        self._new_rollouts = None
        if rollouts is None or self.fallback_reason or not self.model.training:
            return inputs
        return trl_compat.split_in_order(self, rollouts)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Remember the rows for the sampler of a run, and the rollouts for `_prepare_inputs`."""
        self.step_inputs = inputs
        without_weights: AbstractContextManager[None] = contextlib.nullcontext()
        if self.weights_in_loss:
            without_weights = trl_compat.no_importance_weights(self)
        with without_weights, self._trees(None):  # the completions do not exist yet
            rollouts = super()._generate_and_score_completions(inputs)
            if self._predecessors is not None:
                rollouts[trl_compat.PREDECESSORS] = self._predecessors
        if self.teacher:
            rollouts |= self.teacher.prompts([step_input.get("id") for step_input in inputs])
        self._new_rollouts = rollouts
        return rollouts

    @contextlib.contextmanager
    def _trees(self, predecessors: Any) -> Iterator[None]:
        """Let the loss pass know, inside the block, which completions are trees."""
        self._predecessors = predecessors
        try:
            yield
        finally:
            self._predecessors = None

    def _generate(self, prompts: list[Any]) -> Any:
        """Measure the sampling of a step, and keep the trees among its completions for the passes that follow."""
        if not self.model.training:  # TRL's `evaluate`
            generated = super()._generate(prompts)
            self._predecessors = trl_compat.take_predecessors(self, generated)
            return generated
        with self._timed("rollouts"), self.step_metrics.peaks.phase("sampling", then="scoring"):
            generated = super()._generate(prompts)
        self._predecessors = trl_compat.take_predecessors(self, generated)
        token_ids, logprobs = trl_compat.sampled_tokens(generated)
        self.step_metrics.add_rollouts(token_ids, logprobs)
        if self.sampler:
            for phase, seconds in self.sampler.phase_seconds.items():
                self.step_metrics.add(f"time/{phase}", seconds)
        return generated

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Sample with this package's sampler, which is faster, or with TRL's code if it cannot."""
        completions = None
        if not self.fallback_reason and not self.sampler_failure:
            completions = self.step_sampling.sample(prompt_ids, num_generations, sampling_fallback_reason(self))
        if completions is None:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs
            )
        token_ids = [completion.token_ids for completion in completions]
        logprobs = [completion.logprobs for completion in completions]
        return token_ids, logprobs

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Measure the rewards of a step."""
        with self._timed("rewards"):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the memory of the loss, and then of the backward pass and the optimizer."""
        with self.step_metrics.peaks.phase("loss", then="backward"):
            return super().compute_loss(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Tell the loss pass which completions the loss is for, and compare its logprobs with the sampler's.

        With a teacher, its logprobs are a part of the advantages, or its distributions add a term to the loss.
        """
        # Which completions the model must read: without one, nothing is compared, and DDP needs a pass in each process.
        is_last = self.accelerator.sync_gradients  # of the micro-batches of a step
        may_skip_rows = not trl_compat.loss_depends_on_all_tokens(self)
        compares_nothing = is_last and self.sampler_comparison.is_empty
        needs_pass = compares_nothing or self.accelerator.num_processes > 1
        predecessors = inputs.get(trl_compat.PREDECESSORS)

        # Importance weights are computed in the loss, unless TRL has computed them, and compared the logprobs, before.
        importance_sampling = trl_compat.importance_sampling(self)
        trl_has_compared = importance_sampling is not None and not self.weights_in_loss
        if trl_has_compared:
            importance_sampling = None

        # The teacher reads the completions before the trained model does.
        teacher = self.teacher
        distillation = None
        keeping_states: AbstractContextManager[Any] = contextlib.nullcontext()
        if teacher:
            distillation = teacher.distillation
            scores = self._read_as_teacher(teacher, inputs, predecessors)
            # A copy, because the same rollouts may have other advantages when they are used again.
            inputs = {**inputs, TEACHER_LOGPROBS: scores.logprobs}
            if teacher.compares_distributions:
                keeping_states = self.loss_pass.keeping_hidden_states()

        # TRL computes the loss. It calls `_get_per_token_logps_and_entropies` below, and then reads `inputs`.
        with (
            self._trees(predecessors),
            keeping_states as student_states,
            self.loss_pass.micro_batch(
                inputs,
                may_skip_rows=may_skip_rows,
                needs_pass=needs_pass,
                importance_sampling=importance_sampling,
                distillation=distillation,
            ) as micro_batch,
        ):
            loss = super()._compute_loss(model, inputs)

        # Add the divergence from the teacher.
        if teacher:
            divergences = None
            if teacher.compares_distributions:
                divergences = teacher.divergences(student_states[0], scores.hidden_states, micro_batch.loss_mask())
                normalizer = trl_compat.tokens_in_step(self, inputs)
                loss = loss + teacher.distillation.weight * divergences.sum() / normalizer
            micro_batch.add_to(self.teacher_comparison, divergences)

        # Collect the metrics of the micro-batch, and complete those of the step with its last one.
        is_first_use = self.model.training and not trl_compat.reuses_rollouts(self)
        if is_first_use and not trl_has_compared:
            self.sampler_comparison.add(micro_batch)
        if is_last:
            self._add_sampler_comparison()
        if is_last and teacher:
            self._add_teacher_comparison(teacher)
        return loss

    def _read_as_teacher(self, teacher: TeacherPass, inputs: Mapping[str, Any], predecessors: Any) -> TeacherScores:
        """Return what the teacher says about the completions of a micro-batch, and measure its memory and time."""
        started = clock()
        with self.step_metrics.peaks.phase("teacher", then="loss"):
            scores = teacher.read(inputs, predecessors)
        self._teacher_seconds += clock() - started
        return scores

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute logprobs with the exact loss pass, which calls TRL's method on what is left to compute."""
        return self.loss_pass.logprobs(model, *args, predecessors=self._predecessors, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Complete the metrics of the step. TRL logs their means."""
        self.step_metrics.complete()
        super().log(*args, **kwargs)

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        """Measure a phase of a training step."""
        if not self.model.training:  # TRL's `evaluate`
            return contextlib.nullcontext()
        return self.step_metrics.timed(phase)

    def _add_sampler_comparison(self) -> None:
        """Add how the sampler differs from the loss in the tokens of a step, under TRL's names."""
        differences = self.sampler_comparison.differences(self.accelerator.gather)
        if differences:
            self.step_metrics.add(LOGPROB_MISMATCH, differences.mean)
            self.step_metrics.add(LARGEST_LOGPROB_MISMATCH, differences.largest)
        weights = self.sampler_comparison.weights(self.accelerator.gather)
        if weights:
            self.step_metrics.add(f"{IMPORTANCE_WEIGHT}/min", weights.smallest)
            self.step_metrics.add(f"{IMPORTANCE_WEIGHT}/mean", weights.mean)
            self.step_metrics.add(f"{IMPORTANCE_WEIGHT}/max", weights.largest)

    def _add_teacher_comparison(self, teacher: TeacherPass) -> None:
        """Add how the model differs from its teacher in the tokens of a step, and how long the teacher has read."""
        difference = self.teacher_comparison.difference(
            self.accelerator.gather, has_divergence=teacher.compares_distributions
        )
        seconds = self._teacher_seconds
        self._teacher_seconds = 0.0
        if not self.model.training:  # TRL's `evaluate`
            return
        self.step_metrics.add("time/teacher", seconds)
        if difference is None:
            return
        self.step_metrics.add(TEACHER_KL, difference.kl)
        self.step_metrics.add(TEACHER_DISAGREEMENT, difference.disagreement)
        if difference.divergence is not None:
            self.step_metrics.add("teacher/divergence", difference.divergence)


class RecipeTrainer(AtomicCheckpoints, FastGRPOTrainer):
    """The trainer of a run: it plays the run's episodes, and grades each once for rewards, log and metrics.

    The run's sampler generates, unless Unsloth's trainer does. Unsloth also has its own loss, which calls TRL's methods
    with other arguments. Errors are raised: a run does not fall back to TRL's code. `padding_obstacle` is not called,
    because a model that counts padding fails the logprob check, which pads rows as the loss does and compares them with
    the sampler's, whose positions do not count padding.
    """

    fallback_errors = ()

    def __init__(
        self,
        run: Run,
        policy: Policy,
        sampler: Sampler,
        scorer: Scorer,
        teacher: TeacherModel | None = None,
        **arguments: Any,
    ) -> None:
        self.run = run
        self.scorer = scorer
        self.engine = policy.engine
        self.longest_row = run.config.model.max_sequence_tokens
        self.keep_checkpoints = run.config.train.keep_checkpoints
        self._episodes: Sequence[Episode] | None = None  # of the step; None if TRL's own code sampled
        self._has_reported_ungraded = False
        super().__init__(model=policy.model, processing_class=policy.tokenizer, **arguments)
        if sampler.serves_training:
            self.step_sampling = StepSampling(self, sampler)
            self.rollout_func = self._play_episodes  # the constructor's argument would make TRL print a warning
        if isinstance(sampler, VllmSampler):
            trl_compat.enable_importance_sampling(self)
        if teacher:
            self.teacher = self._teacher_pass(teacher)
        if self.engine == "unsloth":
            self.weights_in_loss = unsloth_compat.use_logprobs_of_loss_as_old(GRPOTrainer)

    def _teacher_pass(self, teacher: TeacherModel) -> TeacherPass:
        """Return the pass with which the teacher of the run reads completions."""
        loss_pass = self.loss_pass
        if not teacher.shares_base:
            trl_compat.add_fused_head(self, base_of(teacher.model))
            loss_pass = self.build_loss_pass(teacher.model)
            padding_reason = ""
            if loss_pass.packing_disabled_reason:
                padding_reason = self.padding_reason(teacher.model)
            if padding_reason:
                raise UserError(
                    f"--teacher {teacher.teacher.name} cannot score rows: {padding_reason}; pass another one"
                )
            teacher.model.eval()
        rows = self.scorer.rows if teacher.teacher.has_own_prompt else None
        return TeacherPass(teacher, self.run.config.teacher, self, loss_pass, rows, self.processing_class)

    def find_fallback_reason(self) -> str:
        """Return the reason if Unsloth's trainer samples and computes the loss, else ""."""
        return "Unsloth has its own loss" if self.engine == "unsloth" else ""

    def _play_episodes(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        """Play the episodes of a step. TRL's dataset has only the ids of the rows; the scorer has the rows."""
        assert self.sampler
        row_of_completion = [self.scorer.rows[step_input["id"]] for step_input in self.step_inputs]
        request = self.step_sampling.request(row_of_completion, self.num_generations)
        params = dataclasses.replace(request.params, max_turn_tokens=self.run.config.sampling.max_turn_tokens)
        seeds = self.step_sampling.seeds(len(row_of_completion))
        groups = play_all(self.sampler, request.prompts, params, seeds)
        self._episodes = list(itertools.chain.from_iterable(groups))
        return as_trl(self._episodes)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Grade each completion once, log those of all processes, and return the rewards.

        TRL would call the rewards one by one.
        """
        with self._timed("rewards"):
            batch = self._grade(inputs, completion_ids_list)
            step = self.state.global_step + 1
            if self._is_logged(step):
                lines_of_processes = distributed.gather(completion_lines(batch, self.eos_token_ids))
                lines = list(itertools.chain.from_iterable(lines_of_processes))
                self.run.once(lambda: write_completions(self.run.completions, step, lines))
            values_by_reward = [list(values.values()) for values in batch.values]  # a row for each completion
            rewards = trl_compat.gather_rewards(self, values_by_reward)
            self._report_ungraded(step, rewards.isnan().all(dim=1).tolist())
            return rewards

    def _is_logged(self, step: int) -> bool:
        """Return whether completions that are used from a step on are logged: those of the first step and, with
        `completions_steps` N, of steps that include a multiple of N."""
        every_steps = self.run.config.train.completions_steps
        last_step = step + self.num_iterations - 1  # the last one that uses them
        includes_multiple = last_step // every_steps > (step - 1) // every_steps
        return step == 1 or includes_multiple

    def _grade(self, inputs: Any, completion_ids: Sequence[Sequence[int]]) -> ScoredBatch:
        """Grade the episodes of the step, or the completions of Unsloth's trainer."""
        arguments = trl_compat.reward_arguments(self)
        episodes = self._episodes
        self._episodes = None
        if not episodes:
            ids = [row["id"] for row in inputs]
            texts = self.scorer.texts(ids, completion_ids)  # the texts of TRL lack the markers of thoughts
            return self.scorer.score(ids, texts, completion_ids, **arguments)
        batch = self.scorer.score_episodes(episodes, **arguments)
        means = conversation_metrics(episodes)
        if means:
            means_of_processes = distributed.gather(means)  # of equally many conversations
            for name in means:
                mean = statistics.fmean(process_means[name] for process_means in means_of_processes)
                self.step_metrics.add(name, mean)
        return batch

    def _report_ungraded(self, step: int, is_ungraded: Sequence[bool]) -> None:
        """Log the fraction of completions that no reward can grade, and print a line in the first step with any.

        Their advantage is zero, so that they have no gradient, except for a teacher's part; the means and baselines of
        TRL leave them out.
        """
        count = sum(is_ungraded)
        if not count:
            return
        self.step_metrics.add("completions/ungraded_ratio", count / len(is_ungraded))
        if not self._has_reported_ungraded:
            effect = "the model learns from them through its teacher alone" if self.teacher else "they have no gradient"
            console.note(
                f"warning: in step {step} every reward returned None, or the agent failed, for {count} of "
                f"{len(is_ungraded)} completions, so {effect}; their fraction is completions/ungraded_ratio in the "
                "metrics"
            )
        self._has_reported_ungraded = True


def as_trl(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return episodes as TRL's `rollout_func` does. TRL trains on and counts tokens whose `env_mask` is 1.

    A completion is everything after the prompt. Only the model's tokens count in the metrics of its length, in dapo's
    normalizer, and in the mean of GRPO's loss. dr_grpo divides by `max_completion_length`, the budget of all tokens.
    `mask_truncated_completions` leaves out conversations whose last turn was cut.

    An episode of several calls that do not extend each other is one completion, too: the field `predecessors` says what
    each token follows. Its length, its normalizer and its importance weight cover the sampled tokens of all calls, and
    whether it is truncated depends on its last call.
    """
    completion_ids = []
    masks = []
    logprobs = []
    predecessors = []
    for episode in episodes:
        token_ids = episode.token_ids
        mask = episode.loss_mask
        token_logprobs = episode.logprobs

        # For TRL, a completion without a final EOS token is truncated. One that ends at the next `Question:` is not, so
        # it gets an EOS token that is not trained on.
        if episode.asked_next_question:
            token_ids = [*token_ids, episode.eos_token_ids[0]]
            mask = [*mask, 0]
            if token_logprobs is not None:
                token_logprobs = [*token_logprobs, 0.0]

        # The column that each token follows: the one before it, except in a tree.
        columns_before = list(range(-1, len(token_ids) - 1))
        if episode.predecessors is not None:
            columns_before[: len(episode.predecessors)] = episode.predecessors

        completion_ids.append(token_ids)
        masks.append(mask)
        logprobs.append(token_logprobs)
        predecessors.append(columns_before)

    rollouts = {
        "prompt_ids": [episode.prompt_ids for episode in episodes],
        "completion_ids": completion_ids,
        "logprobs": None if None in logprobs else logprobs,
    }
    has_other_tokens = any(0 in mask for mask in masks)
    if episodes[0].session or has_other_tokens:
        rollouts["env_mask"] = masks
    if any(episode.predecessors is not None for episode in episodes):
        rollouts[trl_compat.PREDECESSORS] = predecessors
    return rollouts
