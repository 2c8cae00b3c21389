"""The shipped dimensions of published models."""

import pytest

from lora_grpo.models import KNOWN_MODELS, Shape

PUBLISHED_BYTES = {
    # The sizes of the .safetensors files on the Hub, which have a header of about 60 bytes for each tensor.
    "Qwen/Qwen2.5-0.5B-Instruct": 988_097_824,
    "Qwen/Qwen2.5-1.5B-Instruct": 3_087_467_144,
    "Qwen/Qwen2.5-3B-Instruct": 3_968_658_944 + 2_203_268_048,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": 3_087_467_144,
    "Qwen/Qwen3-0.6B": 1_503_300_328,
    "Qwen/Qwen3-1.7B": 3_441_185_608 + 622_329_984,
    "Qwen/Qwen3-4B-Instruct-2507": 3_957_900_840 + 3_987_450_520 + 99_630_640,
    "meta-llama/Llama-3.2-1B-Instruct": 2_471_645_608,
    "meta-llama/Llama-3.2-3B-Instruct": 4_965_799_096 + 1_459_729_952,
}


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_the_weights_have_the_published_size(name):
    known = KNOWN_MODELS[name]
    published = PUBLISHED_BYTES.get(name) or PUBLISHED_BYTES[name.replace("-Coder", "")]
    headers = published - known.download_bytes
    assert 0 < headers < 1e-4 * published
    tied = known.stores_tied_head * known.config["vocab_size"] * known.config["hidden_size"]
    assert Shape.of(known.config).parameters == known.download_bytes // 2 - tied
