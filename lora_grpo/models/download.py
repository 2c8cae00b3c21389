"""What a model still needs from the Hub: whether its weights are cached, and how large the download is."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from lora_grpo import distributed
from lora_grpo.config import STARTER, ModelConfig
from lora_grpo.files import disk, json_files
from lora_grpo.models.known_models import KNOWN_MODELS
from lora_grpo.models.model_files import is_folder_name, reach_hub, read_config
from lora_grpo.models.shape import Shape, UnknownFamily


def check_download(settings: ModelConfig) -> None:
    """Check that the weights are on this machine or that the Hub can be reached, or raise HubUnavailable."""
    from huggingface_hub.errors import HfHubHTTPError

    if not _is_here(settings):
        with contextlib.suppress(HfHubHTTPError):  # the Hub answers; loading the model reports what is wrong
            reach_hub(settings)


def announce_download(settings: ModelConfig) -> None:
    """Print the size of the weights if they are about to be downloaded."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if distributed.is_main() and not _is_here(settings):
        size = _size(settings)
        about = f"about {disk.size(size)} " if size else ""
        print(f"downloading {settings.name} from the Hugging Face Hub: {about}to {HF_HUB_CACHE}", file=sys.stderr)


def _is_here(settings: ModelConfig) -> bool:
    """Return whether all weights are in a folder or in the Hub cache."""
    from huggingface_hub import try_to_load_from_cache

    if settings.name == STARTER or is_folder_name(settings.name):
        return True

    def find(file: str) -> str | None:
        path = try_to_load_from_cache(settings.name, file, revision=settings.revision)
        return path if isinstance(path, str) else None

    if find("model.safetensors"):
        return True
    index = find("model.safetensors.index.json")
    weights = json_files.read_object(Path(index)).get("weight_map") if index else None
    return isinstance(weights, dict) and all(map(find, set(weights.values())))


def _size(settings: ModelConfig) -> int | None:
    """Return the size of the weights in bytes; None if the architecture is unknown."""
    if settings.name in KNOWN_MODELS:
        return KNOWN_MODELS[settings.name].download_bytes
    config = read_config(settings)
    try:
        parameters = Shape.of(config).parameters
    except UnknownFamily:
        return None
    return parameters * (4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2)
