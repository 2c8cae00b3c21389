"""Which models can be trained, decided from config.json alone: no weights, no torch.

docs/models.md lists the results for each architecture, and tests/models/test_architectures.py measures them.
"""

from collections.abc import Mapping
from typing import Any

from lora_grpo.config import ModelConfig, RunConfig, replace
from lora_grpo.errors import UserError

TRAINABLE = (
    *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3"),
    *("gemma3_text", "gemma4", "gemma4_text", "glm", "glm4", "gpt_neox", "gpt_oss", "granite", "granitemoehybrid"),
    *("helium", "lfm2", "llama", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "nemotron", "olmo"),
    *("olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_text"),
    *("qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
"""Values of `model_type` that passed the tests."""

ONLY_PEFT = ("gemma3", "gemma4", "gemma4_text", "granitemoehybrid", "lfm2", "mistral3", "qwen3_5", "qwen3_5_text")
"""Those that were not tested with Unsloth."""

NOT_IN_VLLM = ("ministral3", "mistral3")
"""Those that vLLM 0.27 does not load, or with other logits (docs/models.md)."""

HAVE_EXPERTS = ("mixtral", "olmoe", "qwen3_moe")
"""Mixtures of experts. An adapter for every expert would have as many parameters as a small model (PEFT 0.21 makes one
for `all-linear`), so only attention is adapted."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def with_supported(config: RunConfig, family: Any) -> RunConfig:
    """Return the configuration with `auto` resolved for what Unsloth or vLLM does not support."""
    if config.model.engine == "auto" and family in ONLY_PEFT:
        config = replace(config, {"model": {"engine": "peft"}})
    if config.sampling.backend == "auto" and family in NOT_IN_VLLM:
        config = replace(config, {"sampling": {"backend": "transformers"}})
    return config


def check_architecture(config: Mapping[str, Any], settings: ModelConfig, engine: str) -> None:
    """Check from its config.json that a model can be trained, or that its code is trusted. Raises UserError."""
    family, stored = config.get("model_type"), config.get("quantization_config")
    reason, fix = "", "pass another model, such as a Llama or Qwen model (docs/models.md lists all types)"
    if stored and not (isinstance(stored, Mapping) and stored.get("load_in_4bit")):
        method = stored.get("quant_method") if isinstance(stored, Mapping) else "an unknown format"
        reason, fix = f"its weights are stored in {method}, not in bitsandbytes' 4 bits", "pass the 16-bit model"
    elif family not in TRAINABLE and config.get("auto_map"):
        if not settings.trust_remote_code:
            reason, fix = "it needs Python code from its repository", "read it, then pass --model.trust-remote-code"
    elif engine == "unsloth" and family in ONLY_PEFT:
        reason, fix = "with Unsloth, it has not been tested", "pass --model.engine peft"
    elif config.get("is_encoder_decoder"):
        reason = "it is an encoder-decoder model, and only decoder-only models are supported"
    elif family not in TRAINABLE:
        reason = "it has not been tested" if family else "its config.json has no model_type"
    if reason:
        kind = f"is a model of type {family}, which " if family else ""
        raise UserError(f"{settings.name} {kind}cannot be trained: {reason}; {fix}")
