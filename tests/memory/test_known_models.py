"""The shipped dimensions of published models."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from lora_grpo.memory import KNOWN_MODELS, Shape

VISION = {"Qwen/Qwen3.5-0.8B": (12, 768, 3072, 12), "Qwen/Qwen3.5-2B": (24, 1024, 4096, 16)}
VISION["Qwen/Qwen3.5-4B"] = VISION["Qwen/Qwen3.5-2B"]
"""Layers, hidden size, inner size and heads of the part that reads images."""


def vision_parameters(name, hidden):
    sizes = zip(("depth", "hidden_size", "intermediate_size", "num_heads"), VISION[name], strict=True)
    config = AutoConfig.for_model("qwen3_5", vision_config={**dict(sizes), "out_hidden_size": hidden})
    with torch.device("meta"):
        return AutoModel.from_config(config.vision_config).num_parameters()


def next_token_parameters(shape):
    """Return the parameters of the layer that predicts the token after the next, which transformers does not load."""
    [layer] = [kind for kind in shape.kinds if not kind.delta]
    linear = sum(inputs * outputs for inputs, outputs in layer.linears.values())
    return linear + layer.other_parameters + 2 * shape.hidden**2 + 3 * shape.hidden


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_the_weights_have_the_published_size(name):
    config = KNOWN_MODELS[name]
    shape = Shape.of(config)
    # These files contain the output head, although it is the same as the embedding.
    tied = shape.vocabulary * shape.hidden if name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B") else 0
    headers = config["weights_bytes"] - 2 * (shape.parameters + tied)  # about 110 bytes for each tensor
    if name in VISION:
        headers -= 2 * (vision_parameters(name, shape.hidden) + next_token_parameters(shape))
    if name == "google/gemma-4-E2B-it":  # and the unused keys and values of 20 layers
        assert headers / config["weights_bytes"] == pytest.approx(0.0966, abs=1e-4)
        return
    assert 0 < headers < 1.2e-4 * config["weights_bytes"]
