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
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from lora_grpo.config import UNREAD_FIELDS
from lora_grpo.errors import RunError
from lora_grpo.models import TRAINABLE, Policy
from lora_grpo.rewards import Scorer
from lora_grpo.runs import AtomicCheckpoints, Run
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed, play_all, sampler_in_process
from lora_grpo.tasks import Episode
from lora_grpo.training.completions import ScoredRollouts, StepMetrics
from lora_grpo.training.logprob_check import check_logprobs
from lora_grpo.training.shared_prompts import SharedPrompts, base_of
from lora_grpo.training.token_logprobs import ChunkedLogProbs, SkipZeroAdvantage


class FastGRPOTrainer(SkipZeroAdvantage, StepMetrics, SharedPrompts, ChunkedLogProbs, GRPOTrainer):
    """A GRPOTrainer that takes the same arguments, computes the same loss, and takes less time.

    - The sampler of this package generates completions. Before the first ones of a model with an adapter, its logprobs
      are compared with the trainer's (`check_logprobs`). Seeds differ from TRL's, so completions do too.
    - The loss pass reads each prompt once for its group, skips completions without advantage, and computes logits in
      tiles. The loss and its gradient are TRL's except for rounding.
    - The adapter is trained in float32. TRL casts that of a quantized model to bfloat16.
    - Logs also contain the metrics of `StepMetrics`.

    If something cannot be faster (`use_vllm`, `tools`, `rollout_func`, images, an attention that cannot share prompts),
    TRL's code does it, and one line on stderr gives the reason.

    Arguments are read when the trainer is built; later changes of `trainer.generation_config` have no effect. In
    `evaluate`, equal prompts in different batches get equal completions.

    Micro-batches are slices in the order of the prompts, not of a random permutation. In total, the gradient of a step
    is the same, unless a step has part of the completions (`steps_per_generation` is greater than
    `gradient_accumulation_steps`), or several micro-batches, of which `loss_type="bnpo"`, `entropy_coef` and
    `top_entropy_quantile` take means or quantiles.

    Raises:
        RunError: in the first step, if the sampler does not sample from the model being trained.
    """

    sampler: Sampler | None = None
    """Set with the first completions."""

    @functools.cached_property
    def why_plain(self) -> str:  # type: ignore[override]
        """The reason why TRL's own code samples and computes the loss, or "". It is also printed."""
        args, model = self.args, self.model
        base = base_of(model)
        devices = set((getattr(base, "hf_device_map", None) or {}).values())
        defaults = {name: GRPOConfig.__dataclass_fields__[name].default for name in sorted(UNREAD_FIELDS)}
        unread = [name for name, default in defaults.items() if (getattr(args, name) or None) != (default or None)]
        adapters = getattr(model, "peft_config", {})  # transformers' own adapters are in a model that is not PEFT's
        has_other = adapters and (base is model or not isinstance(adapters.get("default"), LoraConfig))
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
            "TRL counts the padding of GPT-2": base.config.model_type in ("gpt2", "gpt_neo", "gpt_bigcode"),
        }
        found = next((reason for reason, applies in reasons.items() if applies), "")
        if found:
            print(f"sampling and computing the loss without this package, which takes longer: {found}", file=sys.stderr)
        return found

    def sample_completions(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, **kwargs: Any
    ) -> Any:
        """Return the token ids of a completion of each prompt from the current policy, and their logprobs.

        Args:
            prompt_ids: token ids of the prompts of this process, each once for each of its `num_generations`
                completions.
        """
        if self.sampler is None and self.why_plain:
            return super().sample_completions(prompt_ids, images, multimodal_fields, num_generations, **kwargs)
        self.sampler = self.sampler or self._checked_sampler(prompt_ids)
        seeds = self._seeds(len(prompt_ids))
        if not self.model.training:  # in `evaluate`, a prompt has the same seeds each time
            first = self.accelerator.process_index * len(prompt_ids)
            seen = Counter({tuple(prompt_ids[0]): first % num_generations})  # its group may begin on another process
            for index, ids in enumerate(map(tuple, prompt_ids)):
                seeds[index] = completion_seed(self.args.seed, f"eval {list(ids)}", seen[ids])
                seen[ids] += 1
        heads, params = self._heads(prompt_ids, num_generations)
        completions = [*itertools.chain(*self.sampler.sample(heads, params, seeds))]
        return [each.token_ids for each in completions], [each.logprobs for each in completions]

    def _checked_sampler(self, prompt_ids: list[list[int]]) -> Sampler:
        """Return a sampler of the trained model. A model with an adapter is checked, see `check_logprobs`."""
        with torch.random.fork_rng():  # creating a copy of the model draws random numbers
            sampler = sampler_in_process(self.model, self.processing_class, self.eos_token_ids)
        if hasattr(self.model, "get_base_model"):
            distinct = [list(ids) for ids in dict.fromkeys(map(tuple, prompt_ids))]
            was_training = self.model.training
            try:
                check_logprobs(self, sampler, distinct)
            except RunError as error:
                raise RunError(f"{error}; in a script, TRL's own GRPOTrainer samples with the model itself") from None
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


class RecipeTrainer(AtomicCheckpoints, ScoredRollouts, FastGRPOTrainer):
    """The trainer of a run. The run's sampler generates, unless Unsloth's trainer does.

    Unsloth also has its own loss, which calls the methods of the mixins with other arguments.
    """

    def __init__(self, run: Run, policy: Policy, sampler: Sampler, scorer: Scorer, **arguments: Any) -> None:
        self.run, self.scorer, self.longest_row = run, scorer, run.config.model.max_sequence_tokens
        self.sampler = sampler if sampler.serves_training else None
        self.why_plain = "Unsloth has its own loss" if policy.engine == "unsloth" else ""
        super().__init__(model=policy.model, processing_class=policy.tokenizer, **arguments)
        if self.sampler:
            self.rollout_func = self._roll_out  # as an argument, TRL prints a warning about it

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
    masks = [episode.from_model for episode in episodes]
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
