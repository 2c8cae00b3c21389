"""TRL's GRPOTrainer with the sampler and loss pass of this package: the one for scripts, and the one of the recipes.

This module imports TRL, so `lora_grpo.training` imports it only when FastGRPOTrainer is used.
"""

from __future__ import annotations

import functools
from typing import Any

from trl import GRPOTrainer

from lora_grpo.models import Policy
from lora_grpo.rewards import Scorer
from lora_grpo.runs import AtomicCheckpoints, Run
from lora_grpo.sampling import Sampler
from lora_grpo.training import rollouts, trl_compat
from lora_grpo.training.completions import ScoredRollouts, StepMetrics
from lora_grpo.training.shared_prompts import SharedPrompts
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
        """The reason why TRL's own code samples and computes the loss, or ""."""
        return rollouts.why_plain(self)

    def sample_completions(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, **kwargs: Any
    ) -> Any:
        """Return the token ids of a completion of each prompt, and their logprobs. See `rollouts.sample`."""
        if self.sampler is None and self.why_plain:
            return super().sample_completions(prompt_ids, images, multimodal_fields, num_generations, **kwargs)
        self.sampler = self.sampler or rollouts.checked_sampler(self, prompt_ids)
        return rollouts.sample(self, self.sampler, prompt_ids, num_generations)


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
            trl_compat.set_rollouts(self, self._roll_out)

    def generate_rollouts(self, prompts: list[Any]) -> Any:
        if self.sampler:
            trl_compat.skip_weight_sync(self)
        return super().generate_rollouts(prompts)

    def _roll_out(self) -> dict[str, Any]:
        """Play the episodes of a step. The prompts are those of the rows; TRL's datasets contain only their ids."""
        assert self.sampler
        rows = [self.scorer.rows[each["id"]] for each in self.step_inputs]
        self.episodes = rollouts.play_step(self, self.sampler, rows, self.run.config.sampling.max_turn_tokens)
        return rollouts.as_trl(self.episodes)
