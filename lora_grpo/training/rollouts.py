"""The rollouts of a GRPOTrainer by this package's sampler, and why TRL's own code makes some."""

from __future__ import annotations

import itertools
import sys
from typing import Any

from lora_grpo.config import UNREAD_FIELDS
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed, sampler_in_process
from lora_grpo.training.logprob_check import check_logprobs


def why_plain(trainer: Any) -> str:
    """Return why TRL's own code must sample and compute the loss of a GRPOTrainer, or "", and print it."""
    from peft import LoraConfig
    from trl import GRPOConfig

    args, model = trainer.args, trainer.model
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    defaults = {name: GRPOConfig.__dataclass_fields__[name].default for name in sorted(UNREAD_FIELDS)}
    unread = [name for name, default in defaults.items() if (getattr(args, name) or None) != (default or None)]
    has_lora = isinstance(getattr(model, "peft_config", {}).get("default"), LoraConfig)
    reasons = {
        "Unsloth is imported, and its trainer has its own loss": "unsloth" in sys.modules,
        "`rollout_func` samples": trainer.rollout_func is not None,
        "`tools` and `environment_factory` need several turns": trainer.tools or trainer.environment_factories,
        "`use_vllm` samples": trainer.use_vllm,
        f"the sampler does not read {', '.join(f'`{name}`' for name in unread)}": unread,
        "the processor takes images": trainer._is_vlm,
        "the model is distributed": trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "the adapter is not a LoRA adapter named default": hasattr(model, "peft_config") and not has_lora,
        "the model has a recurrent state": base._is_stateful,
        "TRL counts the padding of GPT-2": base.config.model_type == "gpt2",
    }
    found = next((reason for reason, applies in reasons.items() if applies), "")
    if found:
        print(f"training as TRL's GRPOTrainer does, which takes longer: {found}", file=sys.stderr)
    return found


def checked_sampler(trainer: Any, prompt_ids: list[list[int]]) -> Sampler:
    """Return a sampler of the trained model. A model with an adapter is checked, see `check_logprobs`."""
    sampler = sampler_in_process(trainer.model, trainer.processing_class, trainer.eos_token_ids)
    if hasattr(trainer.model, "peft_config"):
        distinct = [list(ids) for ids in dict.fromkeys(map(tuple, prompt_ids))]
        was_training = trainer.model.training
        check_logprobs(trainer, sampler, distinct)
        trainer.model.train(was_training)
    return sampler


def sample(
    trainer: Any, sampler: Sampler, prompt_ids: list[list[int]], group: int
) -> tuple[list[list[int]], list[list[float] | None]]:
    """Sample a completion of each prompt from the current policy, and return their token ids and logprobs.

    Args:
        prompt_ids: token ids of the prompts of this process. A prompt is listed once for each of its completions.
        group: completions per prompt.
    """
    seed, step = trainer.args.seed, f"step {trainer.state.global_step}"
    if trainer.micro_batch:
        step += f", micro-batch {trainer.micro_batch}"
    # Completions are numbered across all processes, so that two processes sample the same completions as one.
    first = trainer.accelerator.process_index * len(prompt_ids)
    seeds = [completion_seed(seed, step, first + index) for index in range(len(prompt_ids))]
    if not trainer.model.training:  # in `evaluate`, a prompt has the same seeds each time
        seeds = [completion_seed(seed, f"eval {ids}", index % group) for index, ids in enumerate(prompt_ids)]
    heads = prompt_ids[::group]
    if [head for head in heads for _ in range(group)] != prompt_ids:  # this process has partial groups
        heads, group = prompt_ids, 1
    params = SamplingParams(group, trainer.temperature, trainer.top_p, trainer.max_completion_length)
    completions = [*itertools.chain(*sampler.sample(heads, params, seeds))]
    return [each.token_ids for each in completions], [each.logprobs for each in completions]
