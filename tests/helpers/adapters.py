"""Tiny bases and PEFT adapters on disk."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def make_base(folder, *, tied=True, dtype="float32", shards=None, vocabulary=64):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # fresh norms are all ones and biases all zeros
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(getattr(torch, dtype)).save_pretrained(folder, **({"max_shard_size": shards} if shards else {}))
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def make_adapter(base, folder, *, resize=None, **options):
    """An adapter as PEFT saves it, every trainable number moved off its start."""
    model = load(base)
    if resize:
        model.resize_token_embeddings(resize, mean_resizing=False)
    options = {"r": 4, "lora_alpha": 6, "target_modules": LINEAR, **options}
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def live(base, adapter):
    return PeftModel.from_pretrained(load(base).float(), adapter).eval()


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits
