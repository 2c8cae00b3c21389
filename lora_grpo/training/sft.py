"""Supervised fine-tuning on the task's reference answers, with TRL's SFTTrainer.

A row's tokens are those of an evaluation: its rendered prompt, then the completion and the token that ends it. The loss
is the mean over the completion's tokens; in a conversation, over those of the model's turns.
"""

import time
import types
from collections.abc import Sequence
from typing import Any

from lora_grpo.data import gold_episodes, prompt_order
from lora_grpo.grading import Row
from lora_grpo.models import Policy
from lora_grpo.runs import AtomicCheckpoints, Run
from lora_grpo.sampling import Sampler
from lora_grpo.training import trl_compat
from lora_grpo.training.token_logprobs import why_whole
from lora_grpo.training.trl_config import sft_arguments

IGNORED = -100
"""Label of a token without loss."""


class SftSteps:
    """Mixin with the attributes of a GRPOTrainer that the monitor and checks read. List it before TRL's SFTTrainer."""

    num_iterations = 1
    """Steps per batch."""
    temperature = 1.0
    max_completion_length: int
    _seconds = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._seconds += time.perf_counter() - started
        return loss

    def log(self, *args: Any, **kwargs: Any) -> None:
        metrics = trl_compat.step_values(self)
        metrics.pop("num_tokens", None)  # counted from the last resume
        metrics["step_time"].append(self._seconds)
        self._seconds = 0.0
        super().log(*args, **kwargs)  # type: ignore[misc]


def build_sft_trainer(run: Run, policy: Policy, rows: Sequence[Row], sampler: Sampler) -> Any:
    """Build TRL's SFTTrainer. It may raise any of TRL's errors; see `make_trainer`."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    config, tokenizer = run.config, policy.tokenizer
    order = prompt_order(len(rows), config.train.max_steps * config.train.prompts_per_step, config.seed)
    examples = sft_examples(rows, sampler)
    base = policy.model.get_base_model()

    def compute(ids: Any) -> tuple[Any, Any]:
        head, hidden = base.get_output_embeddings(), base.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = base(input_ids=ids, use_cache=False).logits
        return head(hidden).float().log_softmax(-1), logits.float().log_softmax(-1)

    # TRL's loss in chunks of tokens reads the head alone. Unsloth's own loss never materializes the logits.
    trained = trl_compat.trained_adapter(policy.model)
    loss_type = "nll" if policy.engine == "unsloth" or why_whole(base, compute) else "chunked_nll"
    trainer = types.new_class("Trainer", (AtomicCheckpoints, SftSteps, SFTTrainer))(
        model=policy.model,
        processing_class=tokenizer,
        args=SFTConfig(**sft_arguments(config, run.checkpoints, loss_type)),
        train_dataset=Dataset.from_list(examples).select(order),
        data_collator=DataCollatorForLanguageModeling(tokenizer.pad_token_id),
    )
    trl_compat.use_float32_adapter(policy.model, trained)
    trainer.max_completion_length = config.sampling.max_completion_tokens
    return trainer


def sft_examples(rows: Sequence[Row], sampler: Sampler) -> list[dict[str, list[int]]]:
    """Return the `input_ids` and `labels` of each row."""
    examples = []
    for episode in gold_episodes(sampler.tokenizer, rows, sampler.eos_token_ids):
        labels = [token if own else IGNORED for token, own in zip(episode.token_ids, episode.loss_mask, strict=True)]
        prompt = episode.prompt_ids
        examples.append({"input_ids": prompt + episode.token_ids, "labels": [IGNORED] * len(prompt) + labels})
    return examples
