"""Random models with Qwen2.5's published shapes, built on this machine instead of downloaded.

A random model almost never ends a completion, because all tokens are about equally likely. Almost every completion has
the maximum length: the worst case for memory and time.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from lora_grpo import starter
from lora_grpo.files import atomic, json_files

_GPU_BUILD_BYTES = 7 * 2**30
"""With less free GPU memory than this, weights are initialized on the CPU. 3B parameters take 6 GiB in bfloat16."""
_BUILD = """
import json, sys
from pathlib import Path
from lora_grpo.planning.random_model import build
build(Path(sys.argv[1]), json.loads(sys.argv[2]))
"""


def qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 151_936) -> dict[str, Any]:
    """Return the config.json of a Qwen2 model with tied embeddings and the bundled tokenizer's special tokens."""
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


QWEN = {
    "0.5B": qwen2(896, 4864, 24, 14, 2),
    "1.5B": qwen2(1536, 8960, 28, 12, 2),
    "3B": qwen2(2048, 11008, 36, 16, 2),
}


def build_command(folder: Path, config: dict[str, Any]) -> list[str]:
    """Return the command that runs `build` in its own process, which frees its GPU memory when it exits."""
    return [sys.executable, "-c", _BUILD, str(folder), json.dumps(config)]


def build(folder: Path, config: dict[str, Any]) -> None:
    """Write a model with a config.json: bfloat16 weights, the bundled tokenizer and its chat template.

    The tokenizer gets a token for every id, so that any completion can be decoded. No merge produces the added tokens,
    so the encoding of texts does not change.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    on_gpu = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > _GPU_BUILD_BYTES
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    source = starter.model_path()
    shutil.copy(source / "chat_template.jinja", folder)
    settings = json_files.read_object(source / "tokenizer_config.json")
    atomic.write_json(folder / "tokenizer_config.json", {**settings, "model_max_length": 32_768})
    tokenizer = json_files.read_object(source / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"x{number}": number for number in range(config["vocab_size"]) if number not in taken}
    atomic.write_json(folder / "tokenizer.json", tokenizer)
