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
from lora_grpo.models import KNOWN_MODELS

_GPU_BUILD_BYTES = 7 * 2**30
"""With less free GPU memory than this, weights are initialized on the CPU. 3B parameters take 6 GiB in bfloat16."""
_BUILD = """
import json, sys
from pathlib import Path
from lora_grpo.planning.random_model import build
build(Path(sys.argv[1]), json.loads(sys.argv[2]))
"""


QWEN = {
    size: {**KNOWN_MODELS[f"Qwen/Qwen2.5-{size}-Instruct"], "eos_token_id": 2, "pad_token_id": 0}
    for size in ("0.5B", "1.5B", "3B")
}
"""config.json of each model, with the special tokens of the bundled tokenizer."""


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
