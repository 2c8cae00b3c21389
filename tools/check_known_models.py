"""Compare the dimensions and sizes of the models in known_models.json with the Hub. Needs a network.

    python tools/check_known_models.py

Gated models need `hf auth login`. Prints one line for each model, and exits with code 1 if one differs.
"""

import sys

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from lora_grpo.config import ModelConfig
from lora_grpo.errors import UserError
from lora_grpo.memory import KNOWN_MODELS, Shape
from lora_grpo.models import model_files


def main() -> int:
    wrong = 0
    for name, known in KNOWN_MODELS.items():
        try:
            shape = Shape.of(model_files.read_config(ModelConfig(name=name)))
            files = HfApi().model_info(name, files_metadata=True).siblings or []
        except (UserError, HfHubHTTPError, OSError) as error:
            print(f"{name}: not compared: {error}")
            continue
        size = sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))
        same = shape == Shape.of(known) and size == known["weights_bytes"]
        wrong += not same
        print(f"{name}: {'same' if same else f'differs: {shape}, {size:,} bytes on the Hub'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
