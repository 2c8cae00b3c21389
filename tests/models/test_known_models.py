"""The shipped dimensions of published models."""

import pytest

from lora_grpo.models import KNOWN_MODELS, Shape


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_the_weights_have_the_published_size(name):
    config = KNOWN_MODELS[name]
    shape = Shape.of(config)
    # These files contain the output head, although it is the same as the embedding.
    tied = shape.vocabulary * shape.hidden if name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B") else 0
    headers = config["weights_bytes"] - 2 * (shape.parameters + tied)  # about 110 bytes for each tensor
    if "text_config" in config:  # the part that reads images, and a layer that predicts the token after the next
        assert 0.09 < headers / config["weights_bytes"] < 0.18
        return
    assert 0 < headers < 1.2e-4 * config["weights_bytes"]
