"""A run folder on disk, without training."""

import json

import numpy as np
from safetensors.numpy import save_file

from lora_grpo.config.schema import RunConfig
from lora_grpo.prompts.styles import SYSTEM_PROMPTS

WIDTH = 192


def make_adapter(folder, width=WIDTH, base=None, alpha=4):
    folder.mkdir(parents=True)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {
        f"{module}.lora_A.weight": np.zeros((2, width), "f4"),
        f"{module}.lora_B.weight": np.ones((width, 2), "f4"),
    }
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def make_run(folder, fingerprint=None, name="starter"):
    make_adapter(folder / "adapter")
    config = RunConfig(output_dir=str(folder)).to_dict()
    config["model"]["name"] = name
    record = {"lora_grpo_run": 1, "config": config, "data": {"system_prompt": SYSTEM_PROMPTS["xml"]}, "versions": {}}
    record["policy"] = {"fingerprint": fingerprint, "revision": None, "base_model": name}
    (folder / "run.json").write_text(json.dumps(record))
    return folder
