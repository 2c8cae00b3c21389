"""Writes the folder of a model without weights: `python stand_in_model.py FOLDER CONFIG`."""

import json
import sys
from pathlib import Path


def build_command(folder, config):
    """Return the command that takes the place of `lora_grpo.gpu_check.random_model.build_command`."""
    return [sys.executable, __file__, str(folder), json.dumps(config)]


if __name__ == "__main__":
    model = Path(sys.argv[1])
    model.mkdir()
    (model / "config.json").write_text(sys.argv[2])
    (model / "model.safetensors").touch()
