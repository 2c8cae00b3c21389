"""The rollouts of a GRPOTrainer by this package's sampler, and why TRL's own code makes some."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lora_grpo.config import UNREAD_FIELDS
from lora_grpo.errors import RunError
from lora_grpo.sampling import Sampler, SamplingParams, completion_seed, play_all, sampler_in_process
from lora_grpo.tasks import Episode, Row
from lora_grpo.training.logprob_check import check_logprobs
from lora_grpo.training.shared_prompts import base_of


def why_plain(trainer: Any) -> str:
    """Return why TRL's own code must sample and compute the loss of a GRPOTrainer, or "", and print it."""
    from peft import LoraConfig
    from trl import GRPOConfig

    args, model = trainer.args, trainer.model
    base = base_of(model)
    devices = set((getattr(base, "hf_device_map", None) or {}).values())
    defaults = {name: GRPOConfig.__dataclass_fields__[name].default for name in sorted(UNREAD_FIELDS)}
    unread = [name for name, default in defaults.items() if (getattr(args, name) or None) != (default or None)]
    adapters = getattr(model, "peft_config", {})  # transformers' own adapters are in a model that is not PEFT's
    has_other = adapters and (base is model or not isinstance(adapters.get("default"), LoraConfig))
    reasons = {
        "Unsloth's trainer has its own loss": "unsloth" in sys.modules,
        "`rollout_func` samples": trainer.rollout_func is not None,
        "`tools` and `environment_factory` need several turns": trainer.tools or trainer.environment_factories,
        "`use_vllm` samples": trainer.use_vllm,
        f"the sampler does not read {', '.join(f'`{name}`' for name in unread)}": unread,
        "the processor takes images": trainer._is_vlm,
        "the model is distributed": trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "the model uses several GPUs in one process": len(devices) > 1 or args.n_gpu > 1,
        "the adapter is not PEFT's LoRA adapter named default": has_other,
        "`off_policy_mask_threshold` needs logprobs without `top_p`": args.off_policy_mask_threshold and args.top_p < 1,
        "the model has a recurrent state": base._is_stateful,
        "TRL counts the padding of GPT-2": base.config.model_type in ("gpt2", "gpt_neo", "gpt_bigcode"),
    }
    found = next((reason for reason, applies in reasons.items() if applies), "")
    if found:
        print(f"sampling and computing the loss without this package, which takes longer: {found}", file=sys.stderr)
    return found


def checked_sampler(trainer: Any, prompt_ids: list[list[int]]) -> Sampler:
    """Return a sampler of the trained model. A model with an adapter is checked, see `check_logprobs`."""
    import torch

    with torch.random.fork_rng():  # creating a copy of the model draws random numbers
        sampler = sampler_in_process(trainer.model, trainer.processing_class, trainer.eos_token_ids)
    if hasattr(trainer.model, "get_base_model"):
        distinct = [list(ids) for ids in dict.fromkeys(map(tuple, prompt_ids))]
        was_training = trainer.model.training
        try:
            check_logprobs(trainer, sampler, distinct)
        except RunError as error:
            raise RunError(f"{error}; in a script, TRL's own GRPOTrainer samples with the model itself") from None
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
    seeds, seed = _seeds(trainer, len(prompt_ids)), trainer.args.seed
    first = trainer.accelerator.process_index * len(prompt_ids)
    if not trainer.model.training:  # in `evaluate`, a prompt has the same seeds each time
        seen = Counter({tuple(prompt_ids[0]): first % group})  # its group may begin on another process
        for index, ids in enumerate(map(tuple, prompt_ids)):
            seeds[index] = completion_seed(seed, f"eval {list(ids)}", seen[ids])
            seen[ids] += 1
    heads = prompt_ids[::group]
    if [head for head in heads for _ in range(group)] != prompt_ids:  # this process has partial groups
        heads, group = prompt_ids, 1
    params = SamplingParams(group, trainer.temperature, trainer.top_p, trainer.max_completion_length)
    completions = [*itertools.chain(*sampler.sample(heads, params, seeds))]
    return [each.token_ids for each in completions], [each.logprobs for each in completions]


def play_step(trainer: Any, sampler: Sampler, rows: Sequence[Row], max_turn_tokens: int | None) -> list[Episode]:
    """Play an episode of each row with the current policy. A row is listed once for each of its episodes."""
    group, heads = trainer.num_generations, [*rows[:: trainer.num_generations]]
    if [head["id"] for head in heads for _ in range(group)] != [row["id"] for row in rows]:
        heads, group = [*rows], 1  # this process has partial groups
    params = SamplingParams(
        group, trainer.temperature, trainer.top_p, trainer.max_completion_length, max_turn_tokens=max_turn_tokens
    )
    return [*itertools.chain(*play_all(sampler, heads, params, _seeds(trainer, len(rows))))]


def as_trl(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return episodes as TRL's `rollout_func` does. TRL trains on and counts tokens whose `env_mask` is 1.

    A completion is everything after the prompt. Its length in the metrics, dapo's normalizer and the mean of GRPO's
    loss count the model's tokens; `max_completion_length`, which dr_grpo divides by, is the budget of all tokens.
    `mask_truncated_completions` leaves out conversations whose last turn was cut.
    """
    logprobs = [episode.logprobs for episode in episodes]
    found = {
        "prompt_ids": [episode.prompt_ids for episode in episodes],
        "completion_ids": [episode.token_ids for episode in episodes],
        "logprobs": None if None in logprobs else logprobs,
    }
    return found | ({"env_mask": [each.from_model for each in episodes]} if episodes[0].session else {})


def _seeds(trainer: Any, count: int) -> list[int]:
    """Return the seeds of the completions of this process in the current step."""
    step = f"step {trainer.state.global_step}"
    if trainer.micro_batch:
        step += f", micro-batch {trainer.micro_batch}"
    # Completions are numbered across all processes, so that two processes sample the same completions as one.
    first = trainer.accelerator.process_index * count
    return [completion_seed(trainer.args.seed, step, first + index) for index in range(count)]
