"""Tiny random models of each architecture that can be trained, with the tokenizer of the bundled model."""

import shutil

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lora_grpo import starter

_SIZES = {
    "vocab_size": 768, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 2,
}  # fmt: skip
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

CONFIGS = {
    "qwen2": {"model_type": "qwen2", **_SIZES},
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 32},
    "llama": {"model_type": "llama", **_SIZES, "head_dim": 16},
    "mistral": {"model_type": "mistral", **_SIZES, "head_dim": 16, "sliding_window": None},
    "mistral with a sliding window": {"model_type": "mistral", **_SIZES, "head_dim": 16, "sliding_window": 16},
    "gemma2": {"model_type": "gemma2", **_SIZES, "head_dim": 16, "sliding_window": 16},
    "gemma3": {"model_type": "gemma3_text", **_SIZES, "head_dim": 16, "sliding_window": 16},
    "phi3": {"model_type": "phi3", **_SIZES},
    "gpt2": {"model_type": "gpt2", **_GPT2, "vocab_size": 768, "eos_token_id": 2, "bos_token_id": None},
    "smollm3": {"model_type": "smollm3", **_SIZES},
    "granite": {"model_type": "granite", **_SIZES, "embedding_multiplier": 6.0, "logits_scaling": 4.0},
    "qwen3 moe": {"model_type": "qwen3_moe", **_SIZES, "head_dim": 16, **_EXPERTS},
    "mixtral": {"model_type": "mixtral", **_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
}

_OTHERS = (
    *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma", "glm", "glm4", "gpt_neox"),
    *("gpt_oss", "helium", "ministral", "ministral3", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi"),
    *("qwen2_moe", "seed_oss", "stablelm", "starcoder2"),
)
_MORE = {
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},
}
_MORE |= {name: {"head_dim": 16} for name in ("ernie4_5", "gemma", "glm", "glm4", "helium", "seed_oss")}
_MORE |= {name: {"head_dim": 16, "sliding_window": 16} for name in ("cohere2", "exaone4", "ministral", "olmo3")}
OTHERS = {name: {"model_type": name, **_SIZES, **_MORE.get(name, {})} for name in _OTHERS}
"""Families without a row of their own in docs/gpu.md."""


def make_model(folder, config):
    """Save a model with random weights. Norms and biases too differ from the ones and zeros they start with."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(starter.model_path() / name, folder)
    return folder
