"""Save and load an adapter in the folder format of PEFT, which vLLM and Unsloth also read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_grpo.files import atomic


def save_adapter(model: Any, tokenizer: Any, path: Path) -> None:
    """Save the adapter and the tokenizer atomically, replacing an existing folder."""
    with atomic.new_folder(path) as folder:
        model.save_pretrained(folder, selected_adapters=["default"])
        tokenizer.save_pretrained(folder)
        # PEFT's model card is only a template that contains the local path of the base.
        (folder / "README.md").unlink(missing_ok=True)
        (folder / "adapter_model.safetensors").chmod(0o644)
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        # PEFT writes this set in hash order, which differs between processes.
        if isinstance(settings["target_modules"], list):
            settings["target_modules"].sort()
        atomic.write_json(folder / "adapter_config.json", settings)


def load_adapter(model: Any, path: Path) -> None:
    """Load the weights of a saved adapter into a model with an adapter of the same shape."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(model, load_file(path / "adapter_model.safetensors"))
