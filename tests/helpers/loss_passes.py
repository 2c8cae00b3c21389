"""Trainers for one loss pass of a custom model, and micro-batches for them."""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from lora_grpo import starter
from lora_grpo.training import FastGRPOTrainer


class LossPassTrainer(FastGRPOTrainer):
    """A trainer whose loss pass is always this package's. Errors are raised."""

    fallback_errors = ()

    def find_fallback_reason(self):
        return ""


def make_trainer(model, folder, longest_row=1000, packed_attention="sdpa", compiled_layers=False, **settings):
    attributes = {"longest_row": longest_row, "packed_attention": packed_attention, "compiled_layers": compiled_layers}
    trainer_class = type("Trainer", (LossPassTrainer,), attributes)
    default = {"num_generations": 2, "per_device_train_batch_size": 4}
    default |= {"gradient_checkpointing": False, "router_aux_loss_coef": 0.0}
    settings = default | settings
    trainer = trainer_class(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(starter.model_path()),
        args=GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], **settings),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
        reward_funcs=[lambda completions, **columns: [0.0] * len(completions)],
    )
    trainer.current_gradient_accumulation_steps = 1
    if trainer.args.gradient_checkpointing:  # as `train` does
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.model.train()
    if getattr(model, "is_loaded_in_4bit", False):  # TRL casts the adapter to bfloat16; a run undoes it
        _float_adapter(model)
    return trainer


def _float_adapter(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def with_adapter(model, targets="all-linear", **settings):
    torch.manual_seed(1)
    settings = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": targets, "init_lora_weights": False, **settings}
    model = get_peft_model(model, LoraConfig(**settings))
    _float_adapter(model)
    return model


def random_model(family="llama", vocabulary=768, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": vocabulary, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **changes}), dtype=dtype)
    # With the default initialization, all logits would be close to zero.
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    return model


def micro_batch(groups, completion=12, vocabulary=300, prompt=9, seed=0):
    """Return inputs of TRL's `_compute_loss`: prompts and completions of random lengths, the first ones full.

    Args:
        groups: number of completions of each prompt.
        completion: width of the completions.
        prompt: width of the prompts.
    """
    generator = torch.Generator().manual_seed(seed)

    def up_to(width, count):
        lengths = torch.randint(1, width + 1, (count,), generator=generator)
        lengths[0] = width
        return lengths[:, None]

    rows = sum(groups)
    which = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups))
    prompt_mask = (torch.arange(prompt)[None] >= prompt - up_to(prompt, len(groups))).long()[which]
    completion_mask = (torch.arange(completion)[None] < up_to(completion, rows)).long()
    prompts = torch.randint(1, vocabulary, (len(groups), prompt), generator=generator)[which]
    completions = torch.randint(1, vocabulary, (rows, completion), generator=generator)
    return {
        "prompt_ids": prompts * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": completions * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(rows, generator=generator),
        "num_items_in_batch": completion_mask.sum().float(),
        "sampling_per_token_logps": -torch.rand(rows, completion, generator=generator) * completion_mask,
    }


def loss_and_gradients(trainer, inputs):
    """Return the loss, the gradients by name, and the metrics of a pass."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def distance(gradients, expected):
    """Return the norm of the difference of two gradients, relative to the norm of the second."""
    assert gradients.keys() == expected.keys()
    vector = torch.cat([gradients[name].double().flatten() for name in expected])
    expected_vector = torch.cat([gradient.double().flatten() for gradient in expected.values()])
    assert expected_vector.norm() > 0
    return ((vector - expected_vector).norm() / expected_vector.norm()).item()
