"""Tiny random models of each architecture that can be trained, with the tokenizer of the bundled model."""

import shutil

import torch
from transformers import AutoConfig

from lora_grpo import starter
from lora_grpo.models import base_model

_SIZES = {
    "vocab_size": 768, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

_HEADS = {**_SIZES, "head_dim": 16}
_DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16,
    "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 96,
}  # fmt: skip
_GEMMA4 = {  # the last two layers share keys and values of the first two
    **_HEADS, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 32, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 768,
}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_PATCHES = {"image_size": 28, "patch_size": 14}

CONFIGS = {
    "qwen2": {"model_type": "qwen2", **_SIZES},
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 32},
    "llama": {"model_type": "llama", **_SIZES, "head_dim": 16},
    "mistral": {"model_type": "mistral", **_SIZES, "head_dim": 16, "sliding_window": None},
    "mistral with a sliding window": {"model_type": "mistral", **_SIZES, "head_dim": 16, "sliding_window": 16},
    "gemma2": {"model_type": "gemma2", **_SIZES, "head_dim": 16, "sliding_window": 16},
    "gemma3": {"model_type": "gemma3_text", **_SIZES, "head_dim": 16, "sliding_window": 16},
    "phi3": {"model_type": "phi3", **_SIZES},
    "smollm3": {"model_type": "smollm3", **_SIZES},
    "granite": {"model_type": "granite", **_SIZES, "embedding_multiplier": 6.0, "logits_scaling": 4.0},
    "qwen3 moe": {"model_type": "qwen3_moe", **_SIZES, "head_dim": 16, **_EXPERTS},
    "qwen3_5 text": {"model_type": "qwen3_5_text", **_HEADS, **_DELTA_NET},
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text", **_HEADS, **_DELTA_NET, "tie_word_embeddings": True},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
        },
        "tie_word_embeddings": True,
    },
    "gemma3 with images": {
        "model_type": "gemma3",
        "text_config": {**_HEADS, "sliding_window": 16},
        "vision_config": {**_VISION, **_PATCHES},
        "mm_tokens_per_image": 4,
    },
    "gemma4 text": {"model_type": "gemma4_text", **_GEMMA4},
    "gemma4": {
        "model_type": "gemma4",
        "text_config": {"model_type": "gemma4_text", **_GEMMA4},
        "vision_config": {**_VISION, "num_key_value_heads": 2, "head_dim": 16},
        "audio_config": None,
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral", **_HEADS, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **_VISION, **_PATCHES},
    },
    "lfm2": {
        "model_type": "lfm2",
        **_SIZES,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "granite hybrid": {"model_type": "granitemoehybrid", **_SIZES, **_MAMBA},
    "gpt_oss": {"model_type": "gpt_oss", **_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral3": {"model_type": "ministral3", **_SIZES},
    "mixtral": {"model_type": "mixtral", **_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
}

_OTHERS = (
    *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma", "glm", "glm4", "gpt_neox"),
    *("helium", "ministral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi"),
    *("qwen2_moe", "seed_oss", "stablelm", "starcoder2"),
)
_MORE = {
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},
}
_MORE |= {name: {"head_dim": 16} for name in ("ernie4_5", "gemma", "glm", "glm4", "helium", "seed_oss")}
_MORE |= {name: {"head_dim": 16, "sliding_window": 16} for name in ("cohere2", "exaone4", "ministral", "olmo3")}
_WITH_EXPERTS = {
    "granite hybrid with experts": {
        **CONFIGS["granite hybrid"], "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48,
    },
    "gemma4 text with experts": {
        **CONFIGS["gemma4 text"], "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 48,
    },
}  # fmt: skip
OTHERS = {name: {"model_type": name, **_SIZES, **_MORE.get(name, {})} for name in _OTHERS} | _WITH_EXPERTS
"""Families without a row of their own in docs/models.md."""


def make_model(folder, config):
    """Save a model with random weights. Norms and biases too differ from the ones and zeros they start with."""
    torch.manual_seed(0)
    configuration = AutoConfig.for_model(**config)
    model = base_model.auto_class(configuration).from_config(configuration)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(starter.model_path() / name, folder)
    return folder
