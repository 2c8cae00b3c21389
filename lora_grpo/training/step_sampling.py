"""Sampling of a step's completions with this package's sampler: their seeds, and what happens if the sampler fails."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lora_grpo import console
from lora_grpo.errors import one_line
from lora_grpo.sampling import SampledTokens, Sampler, SamplingParams, completion_seed, sampler_in_process
from lora_grpo.training import trl_compat
from lora_grpo.training.logprob_check import check_logprobs, check_same_logprobs


@dataclass(frozen=True)
class SamplingRequest:
    """What a sampler is asked for: G completions of each of B prompts."""

    prompts: list[Any]
    """B prompts, each once. If this process has partial groups, each once for each of its completions, and G is 1."""
    params: SamplingParams
    """With G as `num_samples`."""


class StepSampling:
    """Samples the completions of a trainer's steps.

    A recipe samples itself, in episodes, and uses only `request` and `seeds`.

    Args:
        trainer: a GRPOTrainer.
        sampler: None builds one for the first completions, and compares its logprobs with the trainer's.
    """

    failure = ""
    """The reason why the sampler is not used any more, or ""."""

    def __init__(self, trainer: Any, sampler: Sampler | None = None) -> None:
        self.trainer = trainer
        self.sampler = sampler

    def sample(self, prompt_ids: list[list[int]], num_generations: int, obstacle: str) -> list[SampledTokens] | None:
        """Return a completion of each prompt, or None if TRL's code must sample from now on.

        Args:
            prompt_ids: token ids of the prompts of this process, each once for each of its `num_generations`
                completions.
            obstacle: the reason why the sampler cannot be used now, or "".
        """
        completions = None
        failure = ""
        if obstacle:
            failure = obstacle
        elif self.sampler:
            # This sampler has worked before, so an error has another cause than the model, and is raised.
            completions = self._sample(self.sampler, prompt_ids, num_generations)
        else:
            # The first completions: build the sampler, check it, and keep it if it works.
            try:
                sampler = self._checked_sampler(prompt_ids)
                completions = self._sample(sampler, prompt_ids, num_generations)
                self.sampler = sampler
            except self.trainer.fallback_errors as error:
                failure = one_line(error)

        # All processes must take the same path: the mismatch between sampler and trainer is gathered from all of them,
        # and TRL's code returns no logprobs to compare.
        failure = self._failure_of_any_process(failure)
        if failure:
            self.sampler = None
            self.failure = failure
            print_fallback("sampling", failure)
            return None
        return completions

    def request(self, prompts: Sequence[Any], num_generations: int) -> SamplingRequest:
        """Return the request for prompts that are listed once for each of their completions."""
        unique_prompts = list(prompts[::num_generations])
        repeated_prompts = [prompt for prompt in unique_prompts for _ in range(num_generations)]
        if repeated_prompts != list(prompts):  # this process has partial groups
            unique_prompts = list(prompts)
            num_generations = 1
        trainer = self.trainer
        params = SamplingParams(num_generations, trainer.temperature, trainer.top_p, trainer.max_completion_length)
        return SamplingRequest(unique_prompts, params)

    def seeds(self, count: int) -> list[int]:
        """Return the seeds of the completions of this process in the current step."""
        trainer = self.trainer
        step = f"step {trainer.state.global_step}"
        micro_batch = trl_compat.micro_batch_number(trainer)
        if micro_batch:
            step += f", micro-batch {micro_batch}"
        # Completions are numbered across all processes, so that two processes sample the same completions as one.
        completions_before = trainer.accelerator.process_index * count
        return [completion_seed(trainer.args.seed, step, completions_before + index) for index in range(count)]

    def _failure_of_any_process(self, failure: str) -> str:
        """Return the first failure of all processes, or "". Each process passes its own, or ""."""
        from accelerate.utils import gather_object

        for process_failure in gather_object([failure]):
            if process_failure:
                return str(process_failure)
        return ""

    def _sample(self, sampler: Sampler, prompt_ids: list[list[int]], num_generations: int) -> list[SampledTokens]:
        """Sample a completion of each prompt, with the seeds of a training step or of TRL's `evaluate`."""
        if self.trainer.model.training:
            seeds = self.seeds(len(prompt_ids))
        else:
            seeds = self._evaluation_seeds(prompt_ids, num_generations)
        request = self.request(prompt_ids, num_generations)
        groups = sampler.sample(request.prompts, request.params, seeds)
        return list(itertools.chain.from_iterable(groups))

    def _evaluation_seeds(self, prompt_ids: list[list[int]], num_generations: int) -> list[int]:
        """Return seeds for TRL's `evaluate`, in which a prompt has the same ones each time."""
        trainer = self.trainer
        # The completions of a prompt are numbered. The first group of this process may begin on another process.
        completions_before = trainer.accelerator.process_index * len(prompt_ids)
        next_number = Counter({tuple(prompt_ids[0]): completions_before % num_generations})
        seeds = []
        for ids in prompt_ids:
            prompt = tuple(ids)
            seeds.append(completion_seed(trainer.args.seed, f"eval {list(ids)}", next_number[prompt]))
            next_number[prompt] += 1
        return seeds

    def _checked_sampler(self, prompt_ids: list[list[int]]) -> Sampler:
        """Return a sampler of the trained model whose logprobs are the trainer's, or raise RunError."""
        import torch

        trainer = self.trainer
        model = trainer.model
        with torch.random.fork_rng():  # creating a copy of the model draws random numbers
            sampler = sampler_in_process(model, trainer.processing_class, trainer.eos_token_ids)
        unique_prompts = [list(prompt) for prompt in dict.fromkeys(tuple(ids) for ids in prompt_ids)]
        was_training = model.training
        try:
            if hasattr(model, "get_base_model"):
                check_logprobs(trainer, sampler, unique_prompts, is_script=True)
            else:
                check_same_logprobs(trainer, sampler, unique_prompts)
        finally:
            model.train(was_training)
        return sampler


def print_fallback(task: str, reason: str) -> None:
    """Print that TRL's own code does a task, and why."""
    console.warning(f"{task} without this package, which takes longer: {reason}")
