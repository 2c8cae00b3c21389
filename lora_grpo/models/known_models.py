"""Dimensions of the models in the presets and in docs/gpu.md, so that a run can be planned without a network.

A `config.json` in the Hub cache or on the Hub takes precedence. `tools/check_known_models.py` compares this table with
the Hub.

The dimensions are the same in LitGPT (2026-06) and torchtune (2026-04), and the parameters that the kit counts, at 2
bytes each, are the size of the published weights to within 0.01% (`tests/models/test_known_models.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_grpo.models.shape import Shape


@dataclass(frozen=True)
class KnownModel:
    config: Mapping[str, Any]
    """The entries of config.json that the plan reads."""
    gated: bool = False
    """Whether the Hub asks for a token of an account that has accepted the license."""
    stores_tied_head: bool = False
    """Whether the files contain the output head, although it is the same as the embedding."""

    @property
    def download_bytes(self) -> int:
        """Size of the 16-bit weights on the Hub. The tokenizer adds 10 to 20 MB."""
        shape = Shape.of(self.config)
        return 2 * (shape.parameters + self.stores_tied_head * shape.vocabulary * shape.hidden)


def _config(
    family: Mapping[str, Any], hidden: int, layers: int, heads: int, inner: int, context: int
) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**family, **sizes, "intermediate_size": inner, "max_position_embeddings": context}


_QWEN = {"vocab_size": 151936, "tie_word_embeddings": True}
_QWEN25 = _QWEN | {"model_type": "qwen2", "num_key_value_heads": 2}
_QWEN3 = _QWEN | {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128}
_LLAMA = {"model_type": "llama", "vocab_size": 128256, "tie_word_embeddings": True, "num_key_value_heads": 8}

_QWEN25_HALF = KnownModel(_config(_QWEN25, 896, 24, 14, 4864, 32768))
_QWEN25_1_5 = KnownModel(_config(_QWEN25, 1536, 28, 12, 8960, 32768))
_QWEN25_3 = KnownModel(_config(_QWEN25, 2048, 36, 16, 11008, 32768))

KNOWN_MODELS: Mapping[str, KnownModel] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN25_HALF,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN25_1_5,
    "Qwen/Qwen2.5-3B-Instruct": _QWEN25_3,
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": _QWEN25_HALF,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": _QWEN25_1_5,
    "Qwen/Qwen2.5-Coder-3B-Instruct": _QWEN25_3,
    "Qwen/Qwen3-0.6B": KnownModel(_config(_QWEN3, 1024, 28, 16, 3072, 40960), stores_tied_head=True),
    "Qwen/Qwen3-1.7B": KnownModel(_config(_QWEN3, 2048, 28, 16, 6144, 40960), stores_tied_head=True),
    "Qwen/Qwen3-4B-Instruct-2507": KnownModel(_config(_QWEN3, 2560, 36, 32, 9728, 262144)),
    "meta-llama/Llama-3.2-1B-Instruct": KnownModel(_config(_LLAMA, 2048, 16, 32, 8192, 131072), gated=True),
    "meta-llama/Llama-3.2-3B-Instruct": KnownModel(_config(_LLAMA, 3072, 28, 24, 8192, 131072), gated=True),
}
"""By Hub id."""
