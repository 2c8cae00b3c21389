"""TRL's GRPOTrainer with the sampler and loss pass of this package: the one for scripts, and the one of the recipes.

This module imports TRL, so `lora_grpo.training` imports it only when FastGRPOTrainer is used.
"""

import dataclasses
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import LoraConfig
from transformers import GenerationMixin
from trl import GRPOConfig, GRPOTrainer

from lora_grpo import console
from lora_grpo.config import UNREAD_FIELDS
from lora_grpo.errors import one_line
from lora_grpo.models import TRAINABLE, Policy
from lora_grpo.rewards import Scorer
from lora_grpo.rollouts import Episode, play_all
from lora_grpo.runs import AtomicCheckpoints, Run
from lora_grpo.sampling import SampledTokens, Sampler, SamplingParams, completion_seed, sampler_in_process
from lora_grpo.training.completions import ScoredRollouts, StepMetrics
from lora_grpo.training.logprob_check import check_logprobs, check_same_logprobs
from lora_grpo.training.shared_prompts import SharedPrompts, base_of, why_padding_counts
from lora_grpo.training.token_logprobs import ChunkedLogProbs, SkipZeroAdvantage
from lora_grpo.training.trl_compat import has_own_generate, unread_generation_settings

_GENERATE = GenerationMixin.generate  # of transformers, before a script may replace it


class FastGRPOTrainer(SkipZeroAdvantage, StepMetrics, SharedPrompts, ChunkedLogProbs, GRPOTrainer):
    """A GRPOTrainer that takes the same arguments, computes the same loss, and takes less time.

    - The sampler of this package generates completions. Before the first step, its logprobs are compared with the
      trainer's (`check_logprobs`). Seeds differ from TRL's, so completions do too.
    - The loss pass reads each prompt once for its group, skips completions without advantage, and computes logits in
      tiles. The loss and its gradient are TRL's except for rounding.
    - The adapter is trained in float32. TRL casts that of a quantized model to bfloat16.
    - Logs also contain the metrics of `StepMetrics`.

    If something cannot be faster (`use_vllm`, `tools`, `rollout_func`, images, an attention that cannot share prompts),
    TRL's code does it, and one line on stderr gives the reason. The same happens if this package's code fails before it
    has worked once, or if its sampler does not sample from the model being trained. docs/python.md lists all cases.

    Micro-batches are slices in the order of the prompts, not of a random permutation. In total, the gradient of a step
    is the same, unless a step has part of the completions (`steps_per_generation` is greater than
    `gradient_accumulation_steps`), or several micro-batches, of which `loss_type="bnpo"`, `entropy_coef` and
    `top_entropy_quantile` take means or quantiles. In `evaluate`, equal prompts in different batches get equal
    completions.
    """

    sampler: Sampler | None = None
    """Set with the first completions; None if TRL's code samples."""
    sampler_failure = ""
    """The reason why TRL's code samples although the loss is computed by this package, or ""."""
    fallback_errors: tuple[type[Exception], ...] = (Exception,)

    @functools.wraps(GRPOTrainer.__init__)  # type: ignore[misc]  # for `inspect.signature`
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def find_fallback_reason(self) -> str:
        try:
            reason = self._unsupported() or self._why_trl_samples() or why_padding_counts(self)
        except self.fallback_errors as error:
            reason = f"the model cannot be examined ({one_line(error)})"
        if reason:
            _report("sampling and computing the loss", reason)
        return reason

    def _unsupported(self) -> str:
        """Return which argument or property of the model this package does not support, or ""."""
        args, model = self.args, self.model
        base = base_of(model)
        devices = set((getattr(base, "hf_device_map", None) or {}).values())
        defaults = {name: GRPOConfig.__dataclass_fields__[name].default for name in sorted(UNREAD_FIELDS)}
        unread = [name for name, default in defaults.items() if (getattr(args, name) or None) != (default or None)]
        adapters = getattr(model, "peft_config", {})  # transformers' own adapters are in a model that is not PEFT's
        has_other = adapters and (base is model or not isinstance(adapters.get("default"), LoraConfig))
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        masks_off_policy = args.off_policy_mask_threshold and args.top_p < 1
        reasons = {
            "Unsloth's trainer has its own loss": "unsloth" in sys.modules,
            "`rollout_func` samples": self.rollout_func is not None,
            "`tools` and `environment_factory` need several turns": self.tools or self.environment_factories,
            "`use_vllm` samples": self.use_vllm,
            f"the sampler does not read {', '.join(f'`{name}`' for name in unread)}": unread,
            "the processor takes images": self._is_vlm,
            "the model is distributed": self.is_deepspeed_enabled or self.is_fsdp_enabled,
            "the model uses several GPUs in one process": len(devices) > 1 or args.n_gpu > 1,
            "the adapter is not PEFT's LoRA adapter named default": has_other,
            "`off_policy_mask_threshold` needs logprobs without `top_p`": masks_off_policy,
            "the model has a recurrent state": base._is_stateful and base.config.model_type not in TRAINABLE,
            "`max_completion_length` is None": self.max_completion_length is None,
            "no weight is trainable (`is_trainable=True` loads an adapter for training)": not is_trained,
        }
        return next((reason for reason, applies in reasons.items() if applies), "")

    def _why_trl_samples(self) -> str:
        """Return why this package's sampler would not sample as TRL does now, or "". Scripts may change settings."""
        if has_own_generate(self.model, _GENERATE):
            return "the model has its own `generate`"
        unread = unread_generation_settings(self)
        if unread:
            names = ", ".join(f"`{name}`" for name in unread)
            return f"the sampler does not read {names} of the model's or trainer's generation_config"
        return ""

    def sample_completions(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the token ids of a completion of each prompt from the current policy, and their logprobs.

        Args:
            prompt_ids: token ids of the prompts of this process, each once for each of its `num_generations`
                completions.
        """
        completions = None
        if not self.fallback_reason and not self.sampler_failure:
            completions = self._sample(prompt_ids, num_generations)
        if completions is None:
            return super().sample_completions(prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs)
        return [each.token_ids for each in completions], [each.logprobs for each in completions]

    def _sample(self, prompt_ids: list[list[int]], num_generations: int) -> list[SampledTokens] | None:
        """Return a completion of each prompt, or None if TRL's code must sample from now on."""
        completions = None
        failure = self._why_trl_samples()
        if not failure and self.sampler:
            completions = self._sample_as_seeded(self.sampler, prompt_ids, num_generations)
        elif not failure:
            try:
                sampler = self._checked_sampler(prompt_ids)
                completions = self._sample_as_seeded(sampler, prompt_ids, num_generations)
                self.sampler = sampler
            except self.fallback_errors as error:
                failure = one_line(error)
        if self.accelerator.num_processes > 1:  # the processes take the same path, because they gather metrics of it
            failure = next(filter(None, gather_object([failure])), "")
        if failure:
            self.sampler, self.sampler_failure = None, failure
            _report("sampling", failure)
            return None
        return completions

    def _sample_as_seeded(
        self, sampler: Sampler, prompt_ids: list[list[int]], num_generations: int
    ) -> list[SampledTokens]:
        seeds = self._seeds(len(prompt_ids))
        if not self.model.training:  # in `evaluate`, a prompt has the same seeds each time
            first = self.accelerator.process_index * len(prompt_ids)
            seen = Counter({tuple(prompt_ids[0]): first % num_generations})  # its group may begin on another process
            for index, ids in enumerate(map(tuple, prompt_ids)):
                seeds[index] = completion_seed(self.args.seed, f"eval {list(ids)}", seen[ids])
                seen[ids] += 1
        heads, params = self._heads(prompt_ids, num_generations)
        return [*itertools.chain(*sampler.sample(heads, params, seeds))]

    def _checked_sampler(self, prompt_ids: list[list[int]]) -> Sampler:
        """Return a sampler of the trained model whose logprobs are the trainer's, or raise RunError."""
        with torch.random.fork_rng():  # creating a copy of the model draws random numbers
            sampler = sampler_in_process(self.model, self.processing_class, self.eos_token_ids)
        distinct = [list(ids) for ids in dict.fromkeys(map(tuple, prompt_ids))]
        was_training = self.model.training
        try:
            if hasattr(self.model, "get_base_model"):
                check_logprobs(self, sampler, distinct, is_script=True)
            else:
                check_same_logprobs(self, sampler, distinct)
        finally:
            self.model.train(was_training)
        return sampler

    def _seeds(self, count: int) -> list[int]:
        """Return the seeds of the completions of this process in the current step."""
        step = f"step {self.state.global_step}"
        if self.micro_batch:
            step += f", micro-batch {self.micro_batch}"
        # Completions are numbered across all processes, so that two processes sample the same completions as one.
        first = self.accelerator.process_index * count
        return [completion_seed(self.args.seed, step, first + index) for index in range(count)]

    def _heads(self, prompts: Sequence[Any], group: int) -> tuple[list[Any], SamplingParams]:
        """Return the prompts to sample, and how, from prompts that are listed once for each of their completions."""
        heads = [*prompts[::group]]
        if [head for head in heads for _ in range(group)] != [*prompts]:  # this process has partial groups
            heads, group = [*prompts], 1
        return heads, SamplingParams(group, self.temperature, self.top_p, self.max_completion_length)


def _report(what: str, reason: str) -> None:
    console.warning(f"{what} without this package, which takes longer: {reason}")


class RecipeTrainer(AtomicCheckpoints, ScoredRollouts, FastGRPOTrainer):
    """The trainer of a run. The run's sampler generates, unless Unsloth's trainer does.

    Unsloth also has its own loss, which calls the methods of the mixins with other arguments. Errors are raised: a run
    does not fall back to TRL's code.
    """

    fallback_errors = ()

    def __init__(self, run: Run, policy: Policy, sampler: Sampler, scorer: Scorer, **arguments: Any) -> None:
        self.run, self.scorer, self.longest_row = run, scorer, run.config.model.max_sequence_tokens
        self.sampler = sampler if sampler.serves_training else None
        self.engine = policy.engine
        super().__init__(model=policy.model, processing_class=policy.tokenizer, **arguments)
        if self.sampler:
            self.rollout_func = self._roll_out  # as an argument, TRL prints a warning about it

    def find_fallback_reason(self) -> str:
        return "Unsloth has its own loss" if self.engine == "unsloth" else ""

    def _roll_out(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        """Play the episodes of a step. The prompts are those of the rows; TRL's datasets contain only their ids."""
        assert self.sampler
        rows = [self.scorer.rows[each["id"]] for each in self.step_inputs]
        heads, params = self._heads(rows, self.num_generations)
        params = dataclasses.replace(params, max_turn_tokens=self.run.config.sampling.max_turn_tokens)
        self.episodes = [*itertools.chain(*play_all(self.sampler, heads, params, self._seeds(len(rows))))]
        return as_trl(self.episodes)


def as_trl(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return episodes as TRL's `rollout_func` does. TRL trains on and counts tokens whose `env_mask` is 1.

    A completion is everything after the prompt. Its length in the metrics, dapo's normalizer and the mean of GRPO's
    loss count the model's tokens; `max_completion_length`, which dr_grpo divides by, is the budget of all tokens.
    `mask_truncated_completions` leaves out conversations whose last turn was cut.
    """
    token_ids = [episode.token_ids for episode in episodes]
    logprobs = [episode.logprobs for episode in episodes]
    masks = [episode.loss_mask for episode in episodes]
    # For TRL, a completion without a final EOS token is truncated. One that ends at the next `Question:` is not, so it
    # gets an EOS token that is not trained on.
    for index, episode in enumerate(episodes):
        if episode.asked_next_question:
            token_ids[index] = [*token_ids[index], episode.eos_token_ids[0]]
            masks[index] = [*masks[index], 0]
            logprobs[index] = None if episode.logprobs is None else [*episode.logprobs, 0.0]
    found = {
        "prompt_ids": [episode.prompt_ids for episode in episodes],
        "completion_ids": token_ids,
        "logprobs": None if None in logprobs else logprobs,
    }
    has_other_tokens = any(0 in mask for mask in masks)
    return found | ({"env_mask": masks} if episodes[0].session or has_other_tokens else {})
