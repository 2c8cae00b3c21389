"""Supervised fine-tuning on the task's reference answers, with TRL's SFTTrainer.

A row's tokens are those of an evaluation: its rendered prompt, then the completion and the token that ends it. The loss
is the mean over the completion's tokens; in a conversation, over those of the model's turns.
"""

import functools
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from lora_grpo.data import gold_episodes, longest_first_in_steps, prompt_order
from lora_grpo.errors import UserError
from lora_grpo.grading import Row
from lora_grpo.loss import report_whole_logits, tiles_obstacle
from lora_grpo.models import Policy
from lora_grpo.runs import Run
from lora_grpo.sampling import Sampler
from lora_grpo.training import trl_compat
from lora_grpo.training.trl_config import sft_arguments

IGNORED = -100
"""Label of a token without loss."""


def build_sft_trainer(run: Run, policy: Policy, rows: Sequence[Row], sampler: Sampler) -> Any:
    """Build TRL's SFTTrainer. It may raise any of TRL's errors; see `prepare_training`."""
    from datasets import Dataset
    from trl import SFTConfig
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from lora_grpo.training.sft_trainer import RecipeSFTTrainer  # after `load_policy` has imported Unsloth

    config = run.config
    tokenizer = policy.tokenizer

    # The examples of all steps, in their order.
    num_prompts = config.train.max_steps * config.train.prompts_per_step
    examples = sft_examples(rows, sampler)
    lengths = [len(example["input_ids"]) for example in examples]
    order = prompt_order(len(rows), num_prompts, config.seed)
    order = longest_first_in_steps(order, lengths, config.train.prompts_per_step)

    # TRL 1.16 has one loss, which never computes whole logits. TRL 1.14 has two.
    has_fused_head = trl_compat.has_fused_head()
    loss_type = "nll"
    if not has_fused_head:
        loss_type = _loss_type(policy)
    trainer = RecipeSFTTrainer(
        run,
        model=policy.model,
        processing_class=tokenizer,
        args=SFTConfig(**sft_arguments(config, run.checkpoints, loss_type)),
        train_dataset=Dataset.from_list(examples).select(order),
        data_collator=DataCollatorForLanguageModeling(tokenizer.pad_token_id),
    )
    if has_fused_head:
        _check_fused_head(policy)
    return trainer


def sft_examples(rows: Sequence[Row], sampler: Sampler) -> list[dict[str, list[int]]]:
    """Return the `input_ids` of each row, and as many `labels`: the token where it has a loss, else `IGNORED`."""
    examples = []
    for episode in gold_episodes(sampler.tokenizer, rows, sampler.eos_token_ids):
        labels = [IGNORED] * len(episode.prompt_ids)
        for token, has_loss in zip(episode.token_ids, episode.loss_mask, strict=True):
            labels.append(token if has_loss else IGNORED)
        examples.append({"input_ids": episode.prompt_ids + episode.token_ids, "labels": labels})
    return examples


def _check_fused_head(policy: Policy) -> None:
    """Raise a UserError if the loss of TRL 1.16, which never computes whole logits, would not be the model's."""
    base = policy.model.get_base_model()
    reason = tiles_obstacle(base, functools.partial(trl_compat.compare_fused_head, base))
    if reason:
        raise UserError(
            f"TRL {version('trl')} cannot train this model with SFT: it computes the loss from the weights of the "
            f"output head, and {reason}; install trl==1.14.2"
        )


def _loss_type(policy: Policy) -> str:
    """Return TRL 1.14's name of a loss that needs little memory, if the model allows it."""
    if policy.engine == "unsloth":  # its own loss never materializes the logits
        return "nll"
    base = policy.model.get_base_model()

    def compute(ids: Any) -> tuple[Any, Any]:
        # TRL's loss in chunks of tokens applies the head to hidden states, and nothing that the model does after it.
        hidden_states = base.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits_of_head = base.get_output_embeddings()(hidden_states)
        logits = base(input_ids=ids, use_cache=False).logits
        return logits_of_head.float().log_softmax(-1), logits.float().log_softmax(-1)

    reason = tiles_obstacle(base, compute)
    if not reason:
        return "chunked_nll"
    report_whole_logits(reason)
    return "nll"
