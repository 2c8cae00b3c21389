"""Builds a model with a published shape and random weights, for runs that only measure time and memory.

All tokens are about equally likely, so almost every completion has the maximum length: the worst case for both.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from lora_grpo import starter
from lora_grpo.files import atomic, json_files
from lora_grpo.memory import KNOWN_MODELS

_SPECIAL = {"eos_token_id": 2, "pad_token_id": 0}  # of the bundled tokenizer
QWEN = {**KNOWN_MODELS["Qwen/Qwen2.5-0.5B-Instruct"], **_SPECIAL}
"""config.json of the model of the preset `8gb`."""
LARGER_QWEN = {**KNOWN_MODELS["Qwen/Qwen2.5-1.5B-Instruct"], **_SPECIAL}
"""config.json of the model of the presets `12gb` and `16gb`."""


def build_command(folder: Path, config: dict[str, Any]) -> list[str]:
    """Return the command that runs `build` in its own process, so that this one does not load torch."""
    return [sys.executable, "-m", __name__, str(folder), json.dumps(config)]


def build(folder: Path, config: dict[str, Any]) -> None:
    """Write a model with a config.json: bfloat16 weights, the bundled tokenizer and its chat template.

    The tokenizer gets a token for every id, so that any completion can be decoded. No merge produces the added tokens,
    so the encoding of texts does not change.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
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


if __name__ == "__main__":
    build(Path(sys.argv[1]), json.loads(sys.argv[2]))
